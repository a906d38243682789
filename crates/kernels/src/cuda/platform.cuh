// What every kernel text stands on, put in front of it before it is compiled. It includes no header, so that the
// run-time compiler needs none. All inline PTX of the project is here; with PLICA_EMULATOR the same names mean the
// functions of emulator/emulator.h, and the same kernels run on the CPU.
//
// Conventions of the kernel texts
//   KERNEL void NAME_TYPE(...)     an entry; TYPE is f32, f64 or bf16 (two of them where two types differ)
//   EXPORT(NAME_TYPE)              after it: makes it known to the emulator
//   SHARED(T, name, n)             static shared memory, n elements;  DYNAMIC_SHARED(T, name)  the dynamic part
//   acc_t<T>                       the accumulator: float for bf16 and float, double for double
// Sums have a fixed order: no floating-point atomics. No block waits for another one. Grids may be larger than the
// work, and zero rows mean that nothing is launched.
#ifdef PLICA_EMULATOR
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define DEVICE_SPECIAL inline
#define KERNEL extern "C"
#else
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE_SPECIAL __device__ __forceinline__
#define KERNEL extern "C" __global__
#define EXPORT(name)
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define DYNAMIC_SHARED(T, name) extern __shared__ __align__(128) unsigned char plica_dynamic_shared[]; T* name = reinterpret_cast<T*>(plica_dynamic_shared)
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- element types
struct bf16 {
    u16 bits;
};

template <class T> struct AccOf { typedef float type; };
template <> struct AccOf<double> { typedef double type; };
template <class T> using acc_t = typename AccOf<T>::type;

DEVICE float bits_to_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE u32 float_to_bits(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }

DEVICE float to_acc(float x) { return x; }
DEVICE double to_acc(double x) { return x; }
DEVICE float to_acc(bf16 x) { return bits_to_float(u32(x.bits) << 16); }

// Rounds to the nearest, ties to even; NaN stays NaN.
#ifdef PLICA_EMULATOR
DEVICE u16 bf16_bits(float x) {
    u32 bits = float_to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16((bits >> 16) | 0x40u);
    return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
DEVICE u16 bf16_bits(float x) { u16 bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits; }
#endif

template <class T> struct Rounding;
template <> struct Rounding<float> { static DEVICE_MEMBER float from(float x) { return x; } };
template <> struct Rounding<double> { static DEVICE_MEMBER double from(double x) { return x; } };
template <> struct Rounding<bf16> { static DEVICE_MEMBER bf16 from(float x) { bf16 y; y.bits = bf16_bits(x); return y; } };
template <class T> DEVICE T from_acc(acc_t<T> x) { return Rounding<T>::from(x); }

// Two rounded values in one register, the first in the low half (the order of tensor-core operands).
DEVICE u32 pack_bf16(float low, float high) { return u32(bf16_bits(low)) | (u32(bf16_bits(high)) << 16); }

// ---- arithmetic by accumulator type
DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float log1p_of(float x) { return log1pf(x); }
DEVICE double log1p_of(double x) { return log1p(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE double sqrt_of(double x) { return sqrt(x); }
DEVICE float erf_of(float x) { return erff(x); }
DEVICE double erf_of(double x) { return erf(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float pow_of(float x, float y) { return powf(x, y); }
DEVICE double pow_of(double x, double y) { return pow(x, y); }
// A product that is rounded on its own; a plain one may be fused with the sum that follows.
DEVICE float mul_rn(float x, float y) { return __fmul_rn(x, y); }
DEVICE double mul_rn(double x, double y) { return __dmul_rn(x, y); }
// a b + c, rounded once: a sum's bits do not depend on what the compiler joins.
DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fma_of(double a, double b, double c) { return fma(a, b, c); }
template <class A> DEVICE A max_of(A a, A b) { return a > b ? a : b; }
template <class A> DEVICE A min_of(A a, A b) { return a < b ? a : b; }
template <class A> DEVICE A infinity();
template <> DEVICE_SPECIAL float infinity<float>() { return bits_to_float(0x7f800000u); }
template <> DEVICE_SPECIAL double infinity<double>() { return double(bits_to_float(0x7f800000u)); }
DEVICE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// ---- 16 bytes at a time: one memory transaction of a thread
template <class T> struct Pack {
    static constexpr int COUNT = 16 / int(sizeof(T));
    T v[COUNT];
};
// Both need an address that is a multiple of 16; a GPU faults on another one, and so does the emulator.
#ifndef PLICA_EMULATOR
#define CHECK_ALIGNED_16(pointer)
#endif
template <class T> DEVICE Pack<T> load_pack(const T* from) {
    CHECK_ALIGNED_16(from);
    uint4 raw = *reinterpret_cast<const uint4*>(from);
    Pack<T> pack;
    memcpy(&pack, &raw, 16);
    return pack;
}
template <class T> DEVICE void store_pack(T* to, const Pack<T>& pack) {
    CHECK_ALIGNED_16(to);
    uint4 raw;
    memcpy(&raw, &pack, 16);
    *reinterpret_cast<uint4*>(to) = raw;
}
DEVICE bool is_aligned_16(const void* pointer) { return (reinterpret_cast<u64>(pointer) & 15u) == 0; }
// The elements from `start` on of a row of n, zeros beyond its end. PACKED: the row's address is a multiple of 16 and n
// one of COUNT; otherwise elements are read one by one, by the same thread, so that sums do not depend on alignment.
template <class T, bool PACKED> DEVICE Pack<T> load_part(const T* row, int start, int n) {
    if constexpr (PACKED) {
        return load_pack(row + start);
    } else {
        Pack<T> pack;
        for (int i = 0; i < Pack<T>::COUNT; i++) pack.v[i] = start + i < n ? row[start + i] : from_acc<T>(acc_t<T>(0));
        return pack;
    }
}
template <class T, bool PACKED> DEVICE void store_part(T* row, int start, int n, const Pack<T>& pack) {
    if constexpr (PACKED) {
        store_pack(row + start, pack);
    } else {
        for (int i = 0; i < Pack<T>::COUNT; i++)
            if (start + i < n) row[start + i] = pack.v[i];
    }
}

// ---- a warp and a block as one
constexpr u32 WHOLE_WARP = 0xffffffffu;

// The same bits on every lane: partners add the same two values.
template <class A> DEVICE A warp_sum(A x) {
    for (int distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}
template <class A> DEVICE A warp_max(A x) {
    for (int distance = 16; distance > 0; distance >>= 1) x = max_of(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}
// Sum over the threads of a block of whole warps, the same bits on every thread; `scratch` holds 32 elements and may
// be used again at once.
template <class A> DEVICE A block_sum(A x, A* scratch) {
    x = warp_sum(x);
    int warps = int(blockDim.x) >> 5;
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    A total = 0;
    for (int i = 0; i < warps; i++) total += scratch[i];
    __syncthreads();
    return total;
}
template <class A> DEVICE A block_max(A x, A* scratch) {
    x = warp_max(x);
    int warps = int(blockDim.x) >> 5;
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    A largest = scratch[0];
    for (int i = 1; i < warps; i++) largest = max_of(largest, scratch[i]);
    __syncthreads();
    return largest;
}

// ---- the largest, ties to the lower index
// A place in a falling order: before all others that are smaller, or equal and of a higher index.
template <class A> struct Ranked {
    A value;
    int index;
};
constexpr int NO_INDEX = 0x7fffffff;
template <class A> DEVICE bool precedes(Ranked<A> a, Ranked<A> b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}
// What stands before and behind everything.
template <class A> DEVICE Ranked<A> before_all() { Ranked<A> r; r.value = infinity<A>(); r.index = -1; return r; }
template <class A> DEVICE Ranked<A> behind_all() { Ranked<A> r; r.value = -infinity<A>(); r.index = NO_INDEX; return r; }
// The first of the lanes' ones, on every lane.
template <class A> DEVICE Ranked<A> warp_first(Ranked<A> best) {
    for (int distance = 16; distance > 0; distance >>= 1) {
        Ranked<A> other;
        other.value = __shfl_xor_sync(WHOLE_WARP, best.value, distance);
        other.index = __shfl_xor_sync(WHOLE_WARP, best.index, distance);
        if (precedes(other, best)) best = other;
    }
    return best;
}

// ---- products c [m, n] of matrices whose rows are in groups, cut into tiles of TM rows and TN columns
// The rows that a tile makes (`row` to `row_end`, at most TM of them), its first column, the part of the inner dim that
// it sums over, and the group whose matrix it takes.
struct Tile {
    i64 group, row, row_end, column, k, k_end;
};
// Where groups begin, [2][groups + 2]: their first rows, then their first rows of tiles; rows behind the last group are
// one more group, and the end of all follows it. Null is one group of all rows.
typedef const int* Starts;
// Neighbouring blocks take tiles of 8 rows of tiles: what they read stays in the second-level cache.
DEVICE void banded(i64 t, i64 rows, i64 columns, i64& row, i64& column) {
    constexpr i64 BAND = 8;
    i64 band = t / (BAND * columns), within = t % (BAND * columns);
    i64 height = min_of(BAND, rows - band * BAND);
    row = band * BAND + within % height;
    column = within / height;
}
// Tiles where the groups are of rows of c.
template <int TM, int TN> DEVICE i64 tiles_of_rows(Starts starts, i64 groups, i64 m, i64 n) {
    return (starts ? i64(starts[2 * groups + 3]) : ceil_div(m, i64(TM))) * ceil_div(n, i64(TN));
}
// One of them. A tile behind the last group has nothing to sum.
template <int TM, int TN> DEVICE Tile tile_of_rows(i64 t, Starts starts, i64 groups, i64 m, i64 n, i64 k) {
    i64 columns = ceil_div(n, i64(TN)), row, column;
    banded(t, tiles_of_rows<TM, TN>(starts, groups, m, n) / columns, columns, row, column);
    if (!starts) return {0, row * TM, min_of(row * TM + TM, m), column * TN, 0, k};
    Starts tiles = starts + groups + 2;
    i64 low = 0, high = groups;
    while (low < high) {
        i64 middle = (low + high + 1) / 2;
        if (tiles[middle] <= row) low = middle;
        else high = middle - 1;
    }
    i64 first = starts[low] + (row - tiles[low]) * TM;
    return {low, first, min_of(first + TM, i64(starts[low + 1])), column * TN, 0, low < groups ? k : 0};
}
// Tiles where the groups are parts of the inner dim.
template <int TM, int TN> DEVICE i64 tiles_of_inner(i64 groups, i64 m, i64 n) { return groups * ceil_div(m, i64(TM)) * ceil_div(n, i64(TN)); }
template <int TM, int TN> DEVICE Tile tile_of_inner(i64 t, Starts starts, i64 groups, i64 m, i64 n, i64 k) {
    i64 rows = ceil_div(m, i64(TM)), columns = ceil_div(n, i64(TN)), group = t / (rows * columns), row, column;
    banded(t % (rows * columns), rows, columns, row, column);
    i64 first = starts ? starts[group] : 0, last = starts ? starts[group + 1] : k;
    return {group, row * TM, min_of(row * TM + TM, m), column * TN, first, last};
}

// The threads of a block in groups of `lanes`, a row of a tensor for each group at a time; `lanes` is a power of two up
// to 32, or the whole block. It follows from the width of a row alone (`cuda/groups.rs`), and so do the sums' orders.
struct Group {
    int lanes, lane, index, count;
};
DEVICE Group own_group(int lanes) {
    Group group = {lanes, int(threadIdx.x) % lanes, int(threadIdx.x) / lanes, int(blockDim.x) / lanes};
    return group;
}
// Sum over the threads of a group, the same bits on each; all threads of the block call it. `scratch` holds 32 elements.
template <class A> DEVICE A group_sum(A x, const Group& group, A* scratch) {
    if (group.lanes > 32) return block_sum(x, scratch);
    for (int distance = group.lanes >> 1; distance > 0; distance >>= 1) x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// ---- the generator of rng.rs: Philox4x32-10, four words a counter
struct Words {
    u32 w[4];
};
DEVICE Words philox(u64 index, u64 purpose, u64 seed) {
    u32 c0 = u32(index), c1 = u32(index >> 32), c2 = u32(purpose), c3 = u32(purpose >> 32);
    u32 k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = u64(c0) * 0xD2511F53u, b = u64(c2) * 0xCD9E8D57u;
        c0 = u32(b >> 32) ^ c1 ^ k0;
        c1 = u32(b);
        c2 = u32(a >> 32) ^ c3 ^ k1;
        c3 = u32(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Words words = {{c0, c1, c2, c3}};
    return words;
}

// ---- tensor cores and asynchronous copies (sm_80 and newer)
// d[16 x 8] += a[16 x 16] b[16 x 8], bf16 operands and f32 sums, in the fragment layouts of the PTX manual
// (mma.m16n8k16): lane l holds rows l / 4 and l / 4 + 8 and columns 2 (l % 4), + 1 of d.
#ifndef PLICA_EMULATOR
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }
// Four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 name the rows (16 bytes each) of matrix i.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// 16 bytes from global to shared memory, both aligned to 16; only the first `bytes` are read, zeros fill the rest.
DEVICE void cp_async_16(void* to_shared, const void* from_global, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are under way; a barrier must follow before other threads read.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif
