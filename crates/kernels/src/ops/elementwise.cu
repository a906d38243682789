// Arithmetic element by element: each element is read and written once, in packs of 16 bytes where all addresses are
// multiples of 16. Bytes moved: binary 3 n s, unary and update 2 n s or 3 n s (n elements of s bytes); the floor is
// that over the memory's bandwidth.

// out[i] = f(a[i], b[i]), with a pack a thread and a ragged end.
template <class T, class F> DEVICE void zip(const T* a, const T* b, T* out, i64 n, F f) {
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = 0;
    if (is_aligned_16(a) && is_aligned_16(b) && is_aligned_16(out)) packs = n / Pack<T>::COUNT;
    for (i64 p = first; p < packs; p += stride) {
        Pack<T> x = load_pack(a + p * Pack<T>::COUNT), y = load_pack(b + p * Pack<T>::COUNT);
        for (int i = 0; i < Pack<T>::COUNT; i++) x.v[i] = from_acc<T>(f(to_acc(x.v[i]), to_acc(y.v[i])));
        store_pack(out + p * Pack<T>::COUNT, x);
    }
    for (i64 i = packs * Pack<T>::COUNT + first; i < n; i += stride) out[i] = from_acc<T>(f(to_acc(a[i]), to_acc(b[i])));
}

template <class A> struct Sum {
    DEVICE_MEMBER A operator()(A x, A y) const { return x + y; }
};
template <class A> struct Multiply {
    DEVICE_MEMBER A operator()(A x, A y) const { return x * y; }
};

#define BINARY(NAME, F, T, TYPE)                                                                  \
    KERNEL __launch_bounds__(256) void NAME##_##TYPE(const T* a, const T* b, T* out, i64 n) {      \
        zip(a, b, out, n, F<acc_t<T>>());                                                          \
    }                                                                                             \
    EXPORT(NAME##_##TYPE)

#define ALL_FLOATS(MACRO, NAME, F) \
    MACRO(NAME, F, float, f32)     \
    MACRO(NAME, F, double, f64)    \
    MACRO(NAME, F, bf16, bf16)

ALL_FLOATS(BINARY, add, Sum)
ALL_FLOATS(BINARY, mul, Multiply)

// out[i] = value, as raw words of the element's size.
template <class W> DEVICE void fill(W* out, W value, i64 n) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += stride) out[i] = value;
}
#define FILL(W, TYPE)                                                                       \
    KERNEL __launch_bounds__(256) void fill_##TYPE(W* out, W value, i64 n) { fill(out, value, n); } \
    EXPORT(fill_##TYPE)
FILL(u8, 1)
FILL(u16, 2)
FILL(u32, 4)
FILL(u64, 8)
