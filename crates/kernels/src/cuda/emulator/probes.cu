// Kernels that test the emulator: right ones, and ones that are wrong on purpose.

// out[i] of block b: 1000 b + the index of the next thread, through shared memory and through a warp.
KERNEL void probe_neighbours(int* out) {
    SHARED(int, next, 64);
    int i = threadIdx.x;
    next[(i + 63) % 64] = i;
    __syncthreads();
    int by_warp = __shfl_sync(WHOLE_WARP, i, (i + 1) & 31);
    int value = (i & 31) == 31 ? next[i] : by_warp;
    out[blockIdx.x * 64 + i] = 1000 * blockIdx.x + value;
}
EXPORT(probe_neighbours)

// The barrier between the write and the read of shared memory is missing.
KERNEL void probe_missing_barrier(int* out) {
    SHARED(int, own, 64);
    int i = threadIdx.x;
    own[i] = i;
    out[i] = i > 0 ? own[i - 1] : -1;
}
EXPORT(probe_missing_barrier)

// Half of the threads wait at the barrier of the block, others for lanes that are there.
KERNEL void probe_dead_end(int* out) {
    if (threadIdx.x < 16) __shfl_sync(WHOLE_WARP, 1, 0);
    else __syncthreads();
    out[threadIdx.x] = 1;
}
EXPORT(probe_dead_end)

// Sixteen bytes from an address that is no multiple of 16.
KERNEL void probe_misaligned(int* out) {
    if (threadIdx.x == 0) store_pack(out + 1, load_pack(out));
}
EXPORT(probe_misaligned)
