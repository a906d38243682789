// Reductions in fixed orders. Sums and extremes over several tensors: element by element from left to right in the
// accumulator, the bits of the CPU; (p + 1) n s bytes for p tensors. Over a whole tensor: a partial result a block,
// which the host adds in their order; n s bytes. Over rows: a warp a row; 2 n s bytes. Over columns: partial sums of
// blocks of rows, added in their order by a second kernel; n s bytes and the partials. All are bound by memory: the
// floor is the bytes over its bandwidth.

namespace reduce {

// Type that a sum over tensors runs in. Integers wrap; unsigned ones may in C++.
template <class T> struct Summed {
    typedef acc_t<T> type;
    static DEVICE_MEMBER type widen(T x) { return to_acc(x); }
    static DEVICE_MEMBER T narrow(type x) { return from_acc<T>(x); }
};
template <class T, class W> struct SummedInteger {
    typedef W type;
    static DEVICE_MEMBER W widen(T x) { return W(x); }
    static DEVICE_MEMBER T narrow(W x) { return T(x); }
};
template <> struct Summed<int> : SummedInteger<int, u32> {};
template <> struct Summed<i64> : SummedInteger<i64, u64> {};
template <> struct Summed<u8> : SummedInteger<u8, u32> {};

// What comparisons see of an element.
DEVICE float value_of(bf16 x) { return to_acc(x); }
template <class T> DEVICE T value_of(T x) { return x; }

// out[i] = parts[0][start + i] + parts[1][start + i] + ..
template <class T> struct SumOver {
    const u64* parts;
    i64 count;
    template <int N> DEVICE_MEMBER void run(i64 start, T* out) const {
        typename Summed<T>::type sum[N];
        T v[N];
        read<N>(0, start, v);
        for (int i = 0; i < N; i++) sum[i] = Summed<T>::widen(v[i]);
        #pragma unroll 4
        for (i64 p = 1; p < count; p++) {
            read<N>(p, start, v);
            for (int i = 0; i < N; i++) sum[i] = sum[i] + Summed<T>::widen(v[i]);
        }
        for (int i = 0; i < N; i++) out[i] = Summed<T>::narrow(sum[i]);
    }
    template <int N> DEVICE_MEMBER void read(i64 part, i64 start, T* v) const {
        const T* from = reinterpret_cast<const T*>(parts[part]) + start;
        if (N == 1) {
            v[0] = *from;
            return;
        }
        Pack<T> pack = load_pack(from);
        memcpy(v, &pack, 16);
    }
};

// The largest or smallest of the parts; the first NaN stays.
template <class T, bool LARGEST> struct ExtremeOver {
    SumOver<T> from;
    template <int N> DEVICE_MEMBER void run(i64 start, T* out) const {
        T v[N];
        from.template read<N>(0, start, out);
        #pragma unroll 4
        for (i64 p = 1; p < from.count; p++) {
            from.template read<N>(p, start, v);
            for (int i = 0; i < N; i++) {
                auto old = value_of(out[i]), next = value_of(v[i]);
                bool better = LARGEST ? next > old : next < old;
                if (old == old && (better || next != next)) out[i] = v[i];
            }
        }
    }
};

// Runs `over` on every element of `out`, whose elements start at `start` in the parts: packs where all addresses allow.
template <class T, class F> DEVICE void over_parts(F over, i64 start, T* out, i64 n, int packed) {
    constexpr int COUNT = Pack<T>::COUNT;
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = packed ? n / COUNT : 0;
    for (i64 p = first; p < packs; p += stride) {
        T result[COUNT];
        over.template run<COUNT>(start + p * COUNT, result);
        Pack<T> pack;
        memcpy(&pack, result, 16);
        store_pack(out + p * COUNT, pack);
    }
    #pragma unroll 1
    for (i64 i = packs * COUNT + first; i < n; i += stride) over.template run<1>(start + i, out + i);
}

// Calls f(value) on the elements of the calling thread.
template <class T, class F> DEVICE void for_own_elements(const T* x, i64 n, F f) {
    constexpr int COUNT = Pack<T>::COUNT;
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = is_aligned_16(x) ? n / COUNT : 0;
    for (i64 p = first; p < packs; p += stride) {
        Pack<T> pack = load_pack(x + p * COUNT);
        for (int i = 0; i < COUNT; i++) f(to_acc(pack.v[i]));
    }
    #pragma unroll 1
    for (i64 i = packs * COUNT + first; i < n; i += stride) f(to_acc(x[i]));
}

template <class T> DEVICE void square_sums(const T* x, i64 n, double* partials) {
    SHARED(double, scratch, 32);
    double sum = 0;
    for_own_elements(x, n, [&sum](acc_t<T> v) { sum += double(v) * double(v); });
    sum = block_sum(sum, &scratch[0]);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// The larger one, and a NaN before everything.
template <class A> DEVICE A largest_or_nan(A a, A b) { return b > a || b != b ? b : a; }

template <class T> DEVICE void maxima(const T* x, i64 n, acc_t<T>* partials) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    A largest = -infinity<A>();
    for_own_elements(x, n, [&largest](A v) { largest = largest_or_nan(largest, v); });
    for (int distance = 16; distance > 0; distance >>= 1)
        largest = largest_or_nan(largest, __shfl_xor_sync(WHOLE_WARP, largest, distance));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < int(blockDim.x) >> 5; i++) largest = largest_or_nan(largest, scratch[i]);
        partials[blockIdx.x] = largest;
    }
}

// 1 where an element is not a finite number: its difference from itself is a NaN.
template <class T> DEVICE void broken(const T* x, i64 n, int* partials) {
    SHARED(int, scratch, 32);
    int found = 0;
    for_own_elements(x, n, [&found](acc_t<T> v) {
        acc_t<T> zero = v - v;
        if (zero != zero) found = 1;
    });
    found = block_max(found, &scratch[0]);
    if (threadIdx.x == 0) partials[blockIdx.x] = found;
}

template <class T> DEVICE void row_dot(const T* a, const T* b, acc_t<T>* out, i64 rows, i64 row_len) {
    constexpr int COUNT = Pack<T>::COUNT;
    bool packed = row_len % COUNT == 0 && is_aligned_16(a) && is_aligned_16(b);
    i64 lane = threadIdx.x & 31, warps = blockDim.x >> 5, packs = packed ? row_len / COUNT : 0;
    for (i64 row = blockIdx.x * warps + (threadIdx.x >> 5); row < rows; row += gridDim.x * warps) {
        const T *x = a + row * row_len, *y = b + row * row_len;
        acc_t<T> sum = 0;
        #pragma unroll 1
        for (i64 p = lane; p < packs; p += 32) {
            Pack<T> u = load_pack(x + p * COUNT), v = load_pack(y + p * COUNT);
            for (int i = 0; i < COUNT; i++) sum += to_acc(u.v[i]) * to_acc(v.v[i]);
        }
        #pragma unroll 1
        for (i64 i = packs * COUNT + lane; i < row_len; i += 32) sum += to_acc(x[i]) * to_acc(y[i]);
        sum = warp_sum(sum);
        if (lane == 0) out[row] = sum;
    }
}

// partials[b, c] = the sum of column c over rows b block_rows ..: a block has 32 packs of columns, each warp every
// eighth row of them.
template <class T> DEVICE void column_sums(const T* x, i64 rows, i64 width, i64 block_rows, acc_t<T>* partials) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT, TILE = 32 * COUNT, WARPS = 8;
    SHARED(A, sums, WARPS * TILE);
    bool packed = width % COUNT == 0 && is_aligned_16(x);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 tiles = ceil_div(width, TILE), jobs = tiles * ceil_div(rows, block_rows);
    for (i64 job = blockIdx.x; job < jobs; job += gridDim.x) {
        i64 block = job / tiles, column = job % tiles * TILE;
        i64 end = min_of((block + 1) * block_rows, rows);
        A own[COUNT];
        for (int i = 0; i < COUNT; i++) own[i] = 0;
        for (i64 row = block * block_rows + warp; row < end; row += WARPS) {
            const T* from = x + row * width + column;
            if (packed) {
                if (column + lane * COUNT < width) {
                    Pack<T> pack = load_pack(from + lane * COUNT);
                    for (int i = 0; i < COUNT; i++) own[i] += to_acc(pack.v[i]);
                }
            } else {
                for (int i = 0; i < COUNT; i++)
                    if (column + lane + 32 * i < width) own[i] += to_acc(from[lane + 32 * i]);
            }
        }
        for (int i = 0; i < COUNT; i++) sums[warp * TILE + (packed ? lane * COUNT + i : lane + 32 * i)] = own[i];
        __syncthreads();
        for (int c = threadIdx.x; c < TILE && column + c < width; c += blockDim.x) {
            A total = 0;
            for (int w = 0; w < WARPS; w++) total += sums[w * TILE + c];
            partials[block * width + column + c] = total;
        }
        __syncthreads();
    }
}

// sums[c] += partials[0, c] + partials[1, c] + ..
template <class A> DEVICE void add_partials(A* sums, const A* partials, i64 blocks, i64 width) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 c = blockIdx.x * i64(blockDim.x) + threadIdx.x; c < width; c += stride) {
        A sum = sums[c];
        for (i64 b = 0; b < blocks; b++) sum += partials[b * width + c];
        sums[c] = sum;
    }
}

}  // namespace reduce

using namespace reduce;

#define OVER_PARTS(T, TYPE)                                                                               \
    KERNEL __launch_bounds__(256, 4) void sum_in_order_##TYPE(const u64* parts, i64 count, i64 start, T* out, i64 n, \
                                                           int packed) {                                  \
        over_parts(SumOver<T>{parts, count}, start, out, n, packed);                                      \
    }                                                                                                     \
    EXPORT(sum_in_order_##TYPE)                                                                           \
    KERNEL __launch_bounds__(256, 4) void max_in_order_##TYPE(const u64* parts, i64 count, i64 start, T* out, i64 n, \
                                                           int packed) {                                  \
        over_parts(ExtremeOver<T, true>{{parts, count}}, start, out, n, packed);                          \
    }                                                                                                     \
    EXPORT(max_in_order_##TYPE)                                                                           \
    KERNEL __launch_bounds__(256, 4) void min_in_order_##TYPE(const u64* parts, i64 count, i64 start, T* out, i64 n, \
                                                           int packed) {                                  \
        over_parts(ExtremeOver<T, false>{{parts, count}}, start, out, n, packed);                         \
    }                                                                                                     \
    EXPORT(min_in_order_##TYPE)
OVER_PARTS(float, f32)
OVER_PARTS(double, f64)
OVER_PARTS(bf16, bf16)
OVER_PARTS(int, i32)
OVER_PARTS(i64, i64)
OVER_PARTS(u8, u8)

#define WHOLE(T, TYPE)                                                                                    \
    KERNEL __launch_bounds__(256, 4) void square_sums_##TYPE(const T* x, i64 n, double* partials) {           \
        square_sums(x, n, partials);                                                                      \
    }                                                                                                     \
    EXPORT(square_sums_##TYPE)                                                                            \
    KERNEL __launch_bounds__(256, 4) void maxima_##TYPE(const T* x, i64 n, acc_t<T>* partials) { maxima(x, n, partials); } \
    EXPORT(maxima_##TYPE)                                                                                 \
    KERNEL __launch_bounds__(256, 4) void broken_##TYPE(const T* x, i64 n, int* partials) { broken(x, n, partials); } \
    EXPORT(broken_##TYPE)                                                                                 \
    KERNEL __launch_bounds__(256, 4) void row_dot_##TYPE(const T* a, const T* b, acc_t<T>* out, i64 rows, i64 row_len) { \
        row_dot(a, b, out, rows, row_len);                                                                \
    }                                                                                                     \
    EXPORT(row_dot_##TYPE)                                                                                \
    KERNEL __launch_bounds__(256, 2) void column_sums_##TYPE(const T* x, i64 rows, i64 width, i64 block_rows,  \
                                                          acc_t<T>* partials) {                           \
        column_sums(x, rows, width, block_rows, partials);                                                \
    }                                                                                                     \
    EXPORT(column_sums_##TYPE)
WHOLE(float, f32)
WHOLE(double, f64)
WHOLE(bf16, bf16)

#define PARTIALS(A, TYPE)                                                                                      \
    KERNEL __launch_bounds__(256, 4) void add_partials_##TYPE(A* sums, const A* partials, i64 blocks, i64 width) { \
        add_partials(sums, partials, blocks, width);                                                           \
    }                                                                                                          \
    EXPORT(add_partials_##TYPE)
PARTIALS(float, f32)
PARTIALS(double, f64)
