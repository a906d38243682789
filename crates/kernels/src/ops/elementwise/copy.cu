// Exact copies that one memory copy cannot do: columns, and transposition. Elements are words of their size; columns
// go in the widest word that all addresses and widths are multiples of. Bytes moved: 2 n s of the n copied elements
// of s bytes; the floor is that over the memory's bandwidth.

// Rows of `width` words from one matrix to another; 2^lanes_log2 threads have a row.
template <class W>
DEVICE void copy_columns(const W* from, i64 from_pitch, W* to, i64 to_pitch, i64 rows, i64 width, int lanes_log2) {
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, threads = i64(gridDim.x) * blockDim.x;
    i64 lanes = i64(1) << lanes_log2, lane = thread & (lanes - 1);
    for (i64 row = thread >> lanes_log2; row < rows; row += threads >> lanes_log2)
        for (i64 i = lane; i < width; i += lanes) to[row * to_pitch + i] = from[row * from_pitch + i];
}

// y[c, r] = x[r, c] in tiles of 32 x 32, turned in shared memory so that both sides move whole rows of a tile.
template <class W> DEVICE void transpose(const W* x, W* y, i64 rows, i64 columns) {
    SHARED(W, tile, 32 * 33);
    i64 across = ceil_div(columns, 32), tiles = across * ceil_div(rows, 32);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = int(blockDim.x) >> 5;
    for (i64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        i64 row = t / across * 32, column = t % across * 32;
        for (int i = warp; i < 32; i += warps)
            if (row + i < rows && column + lane < columns)
                tile[i * 33 + lane] = x[(row + i) * columns + column + lane];
        __syncthreads();
        for (int i = warp; i < 32; i += warps)
            if (column + i < columns && row + lane < rows)
                y[(column + i) * rows + row + lane] = tile[lane * 33 + i];
        __syncthreads();
    }
}

#define COPY_COLUMNS(W, BYTES)                                                                          \
    KERNEL __launch_bounds__(256) void copy_columns_##BYTES(const W* from, i64 from_pitch, W* to, i64 to_pitch, \
                                                            i64 rows, i64 width, int lanes_log2) {        \
        copy_columns(from, from_pitch, to, to_pitch, rows, width, lanes_log2);                            \
    }                                                                                                   \
    EXPORT(copy_columns_##BYTES)
COPY_COLUMNS(u8, 1)
COPY_COLUMNS(u16, 2)
COPY_COLUMNS(u32, 4)
COPY_COLUMNS(u64, 8)
COPY_COLUMNS(uint4, 16)

#define TRANSPOSE(W, BYTES)                                                                              \
    KERNEL __launch_bounds__(256) void transpose_##BYTES(const W* x, W* y, i64 rows, i64 columns) {        \
        transpose(x, y, rows, columns);                                                                   \
    }                                                                                                    \
    EXPORT(transpose_##BYTES)
TRANSPOSE(u8, 1)
TRANSPOSE(u16, 2)
TRANSPOSE(u32, 4)
TRANSPOSE(u64, 8)
