// Arithmetic element by element: each element is read and written once, in packs of 16 bytes where all addresses are
// multiples of 16. Bytes moved of n elements of s bytes: binary and update 3 n s, unary 2 n s, a cast n (s + s'), rows
// scaled or with a bias 2 n s and the short operand; the floor is that over the memory's bandwidth. Products that are
// added to something are rounded first, so that results have the bits of the CPU.

namespace elementwise {

constexpr int most(int a, int b) { return a > b ? a : b; }

// E elements in registers, moved in packs.
template <class T, int E> struct Chunk {
    T v[E];
};
template <int E, class T> DEVICE Chunk<T, E> load_chunk(const T* from) {
    Chunk<T, E> chunk;
    for (int start = 0; start < E; start += Pack<T>::COUNT) {
        Pack<T> pack = load_pack(from + start);
        for (int i = 0; i < Pack<T>::COUNT; i++) chunk.v[start + i] = pack.v[i];
    }
    return chunk;
}
template <int E, class T> DEVICE void store_chunk(T* to, const Chunk<T, E>& chunk) {
    for (int start = 0; start < E; start += Pack<T>::COUNT) {
        Pack<T> pack;
        for (int i = 0; i < Pack<T>::COUNT; i++) pack.v[i] = chunk.v[start + i];
        store_pack(to + start, pack);
    }
}

// out[i] = f(x[i]).
template <class T, class U, class F> DEVICE void map(const T* x, U* out, i64 n, F f) {
    constexpr int E = most(Pack<T>::COUNT, Pack<U>::COUNT);
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 chunks = is_aligned_16(x) && is_aligned_16(out) ? n / E : 0;
    for (i64 c = first; c < chunks; c += stride) {
        Chunk<T, E> from = load_chunk<E>(x + c * E);
        Chunk<U, E> to;
        for (int i = 0; i < E; i++) to.v[i] = f(from.v[i]);
        store_chunk<E>(out + c * E, to);
    }
    #pragma unroll 1
    for (i64 i = chunks * E + first; i < n; i += stride) out[i] = f(x[i]);
}

// out[i] = f(a[i], b[i]); `out` may be `a`.
template <class T, class U, class F> DEVICE void zip(const U* a, const T* b, U* out, i64 n, F f) {
    constexpr int E = most(Pack<T>::COUNT, Pack<U>::COUNT);
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 chunks = is_aligned_16(a) && is_aligned_16(b) && is_aligned_16(out) ? n / E : 0;
    for (i64 c = first; c < chunks; c += stride) {
        Chunk<U, E> x = load_chunk<E>(a + c * E);
        Chunk<T, E> y = load_chunk<E>(b + c * E);
        for (int i = 0; i < E; i++) x.v[i] = f(x.v[i], y.v[i]);
        store_chunk<E>(out + c * E, x);
    }
    #pragma unroll 1
    for (i64 i = chunks * E + first; i < n; i += stride) out[i] = f(a[i], b[i]);
}

template <class T> struct Add {
    DEVICE_MEMBER T operator()(T x, T y) const { return from_acc<T>(to_acc(x) + to_acc(y)); }
};
template <class T> struct Multiply {
    DEVICE_MEMBER T operator()(T x, T y) const { return from_acc<T>(to_acc(x) * to_acc(y)); }
};
template <class T> struct Accumulate {
    DEVICE_MEMBER acc_t<T> operator()(acc_t<T> sum, T x) const { return sum + to_acc(x); }
};
template <class T> struct AddScaled {
    acc_t<T> alpha;
    DEVICE_MEMBER T operator()(T y, T x) const { return from_acc<T>(to_acc(y) + mul_rn(alpha, to_acc(x))); }
};
template <class T> struct Scale {
    acc_t<T> factor;
    DEVICE_MEMBER T operator()(T x) const { return from_acc<T>(factor * to_acc(x)); }
};
template <class T, class U> struct Cast {
    DEVICE_MEMBER U operator()(T x) const { return from_acc<U>(acc_t<U>(to_acc(x))); }
};

// Calls f(row) for the rows of the calling warp.
template <class F> DEVICE void for_rows_of_warp(i64 rows, F f) {
    int warps = int(blockDim.x) >> 5;
    for (i64 row = i64(blockIdx.x) * warps + (threadIdx.x >> 5); row < rows; row += i64(gridDim.x) * warps) f(row);
}

// Row r of x times weights[r].
template <class T> struct ScaleRow {
    const T* x;
    const acc_t<T>* weights;
    T* out;
    i64 row_len;
    bool packed;
    DEVICE_MEMBER void operator()(i64 row) const {
        constexpr int COUNT = Pack<T>::COUNT;
        const T* from = x + row * row_len;
        T* to = out + row * row_len;
        acc_t<T> weight = weights[row];
        i64 lane = threadIdx.x & 31, packs = packed ? row_len / COUNT : 0;
        #pragma unroll 1
        for (i64 p = lane; p < packs; p += 32) {
            Pack<T> pack = load_pack(from + p * COUNT);
            for (int i = 0; i < COUNT; i++) pack.v[i] = from_acc<T>(weight * to_acc(pack.v[i]));
            store_pack(to + p * COUNT, pack);
        }
        #pragma unroll 1
        for (i64 i = packs * COUNT + lane; i < row_len; i += 32) to[i] = from_acc<T>(weight * to_acc(from[i]));
    }
};

// Row r of x plus the bias.
template <class T> struct BiasRow {
    T* x;
    const T* bias;
    i64 width;
    bool packed;
    DEVICE_MEMBER void operator()(i64 row) const {
        constexpr int COUNT = Pack<T>::COUNT;
        T* to = x + row * width;
        i64 lane = threadIdx.x & 31, packs = packed ? width / COUNT : 0;
        #pragma unroll 1
        for (i64 p = lane; p < packs; p += 32) {
            Pack<T> pack = load_pack(to + p * COUNT), more = load_pack(bias + p * COUNT);
            for (int i = 0; i < COUNT; i++) pack.v[i] = from_acc<T>(to_acc(pack.v[i]) + to_acc(more.v[i]));
            store_pack(to + p * COUNT, pack);
        }
        #pragma unroll 1
        for (i64 i = packs * COUNT + lane; i < width; i += 32) to[i] = from_acc<T>(to_acc(to[i]) + to_acc(bias[i]));
    }
};

}  // namespace elementwise

using namespace elementwise;

#define ARITHMETIC(T, TYPE)                                                                                           \
    KERNEL __launch_bounds__(256) void add_##TYPE(const T* a, const T* b, T* out, i64 n) { zip(a, b, out, n, Add<T>()); } \
    EXPORT(add_##TYPE)                                                                                                \
    KERNEL __launch_bounds__(256) void mul_##TYPE(const T* a, const T* b, T* out, i64 n) {                              \
        zip(a, b, out, n, Multiply<T>());                                                                             \
    }                                                                                                                 \
    EXPORT(mul_##TYPE)                                                                                                \
    KERNEL __launch_bounds__(256) void accumulate_##TYPE(acc_t<T>* sum, const T* x, i64 n) {                            \
        zip((const acc_t<T>*)sum, x, sum, n, Accumulate<T>());                                                        \
    }                                                                                                                 \
    EXPORT(accumulate_##TYPE)                                                                                         \
    KERNEL __launch_bounds__(256) void axpy_##TYPE(T* y, acc_t<T> alpha, const T* x, i64 n) {                           \
        zip((const T*)y, x, y, n, AddScaled<T>{alpha});                                                               \
    }                                                                                                                 \
    EXPORT(axpy_##TYPE)                                                                                               \
    KERNEL __launch_bounds__(256) void scale_##TYPE(const T* x, acc_t<T> factor, T* out, i64 n) {                       \
        map(x, out, n, Scale<T>{factor});                                                                             \
    }                                                                                                                 \
    EXPORT(scale_##TYPE)                                                                                              \
    KERNEL __launch_bounds__(256) void scale_rows_##TYPE(const T* x, const acc_t<T>* weights, T* out, i64 rows, i64 n) { \
        bool packed = n % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(out);                              \
        for_rows_of_warp(rows, ScaleRow<T>{x, weights, out, n, packed});                                              \
    }                                                                                                                 \
    EXPORT(scale_rows_##TYPE)                                                                                         \
    KERNEL __launch_bounds__(256) void add_bias_##TYPE(T* x, const T* bias, i64 rows, i64 width) {                      \
        bool packed = width % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(bias);                         \
        for_rows_of_warp(rows, BiasRow<T>{x, bias, width, packed});                                                   \
    }                                                                                                                 \
    EXPORT(add_bias_##TYPE)
ARITHMETIC(float, f32)
ARITHMETIC(double, f64)
ARITHMETIC(bf16, bf16)

#define CAST(T, U, TYPES)                                                                                      \
    KERNEL __launch_bounds__(256) void cast_##TYPES(const T* x, U* out, i64 n) { map(x, out, n, Cast<T, U>()); } \
    EXPORT(cast_##TYPES)
CAST(float, double, f32_f64)
CAST(float, bf16, f32_bf16)
CAST(double, float, f64_f32)
CAST(double, bf16, f64_bf16)
CAST(bf16, float, bf16_f32)
CAST(bf16, double, bf16_f64)

// out[i] = value, as raw words of the element's size.
template <class W> DEVICE void fill(W* out, W value, i64 n) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += stride) out[i] = value;
}
#define FILL(W, TYPE)                                                                               \
    KERNEL __launch_bounds__(256) void fill_##TYPE(W* out, W value, i64 n) { fill(out, value, n); } \
    EXPORT(fill_##TYPE)
FILL(u8, 1)
FILL(u16, 2)
FILL(u32, 4)
FILL(u64, 8)
