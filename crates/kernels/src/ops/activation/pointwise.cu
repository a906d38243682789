// Nonlinearities of one operand, element by element in packs of 16 bytes where all addresses are multiples of 16. Bytes
// moved, of s bytes an element: forward 2 n s, backward 3 n s; the floor is that over the memory's bandwidth.

template <class A> DEVICE A sigmoid(A x) { return A(1) / (A(1) + exp_of(-x)); }

template <class A> struct Silu {
    static DEVICE_MEMBER A value(A x) { return x * sigmoid(x); }
    static DEVICE_MEMBER A slope(A x) {
        A s = sigmoid(x);
        return s + x * s * (A(1) - s);
    }
};

// x Phi(x), Phi the normal distribution.
template <class A> struct GeluExact {
    static DEVICE_MEMBER A both(A x) { return A(1) + erf_of(x * A(0.70710678118654752440)); }
    static DEVICE_MEMBER A value(A x) { return A(0.5) * x * both(x); }
    static DEVICE_MEMBER A slope(A x) {
        A density = A(0.39894228040143267794) * exp_of(A(-0.5) * x * x);
        return A(0.5) * both(x) + x * density;
    }
};

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
template <class A> struct GeluTanh {
    static DEVICE_MEMBER A scale() { return A(0.79788456080286535588); }
    static DEVICE_MEMBER A inner(A x) { return scale() * (x + A(0.044715) * x * x * x); }
    static DEVICE_MEMBER A value(A x) { return A(0.5) * x * (A(1) + tanh_of(inner(x))); }
    static DEVICE_MEMBER A slope(A x) {
        A t = tanh_of(inner(x)), by_x = scale() * (A(1) + A(3 * 0.044715) * x * x);
        return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * by_x;
    }
};

template <class T, class F> DEVICE void forward(const T* x, T* y, i64 n) {
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = is_aligned_16(x) && is_aligned_16(y) ? n / Pack<T>::COUNT : 0;
    for (i64 p = first; p < packs; p += stride) {
        Pack<T> a = load_pack(x + p * Pack<T>::COUNT);
        for (int i = 0; i < Pack<T>::COUNT; i++) a.v[i] = from_acc<T>(F::value(to_acc(a.v[i])));
        store_pack(y + p * Pack<T>::COUNT, a);
    }
    for (i64 i = packs * Pack<T>::COUNT + first; i < n; i += stride) y[i] = from_acc<T>(F::value(to_acc(x[i])));
}

template <class T, class F> DEVICE void backward(const T* dy, const T* x, T* dx, i64 n) {
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = is_aligned_16(dy) && is_aligned_16(x) && is_aligned_16(dx) ? n / Pack<T>::COUNT : 0;
    for (i64 p = first; p < packs; p += stride) {
        Pack<T> g = load_pack(dy + p * Pack<T>::COUNT), a = load_pack(x + p * Pack<T>::COUNT);
        for (int i = 0; i < Pack<T>::COUNT; i++) a.v[i] = from_acc<T>(to_acc(g.v[i]) * F::slope(to_acc(a.v[i])));
        store_pack(dx + p * Pack<T>::COUNT, a);
    }
    for (i64 i = packs * Pack<T>::COUNT + first; i < n; i += stride)
        dx[i] = from_acc<T>(to_acc(dy[i]) * F::slope(to_acc(x[i])));
}

#define POINTWISE(NAME, F, T, TYPE)                                                                                   \
    KERNEL __launch_bounds__(256, 1) void NAME##_forward_##TYPE(const T* x, T* y, i64 n) {                            \
        forward<T, F<acc_t<T>>>(x, y, n);                                                                             \
    }                                                                                                                 \
    EXPORT(NAME##_forward_##TYPE)                                                                                     \
    KERNEL __launch_bounds__(256, 1) void NAME##_backward_##TYPE(const T* dy, const T* x, T* dx, i64 n) {             \
        backward<T, F<acc_t<T>>>(dy, x, dx, n);                                                                       \
    }                                                                                                                 \
    EXPORT(NAME##_backward_##TYPE)
#define ALL_FLOATS(NAME, F)           \
    POINTWISE(NAME, F, float, f32)    \
    POINTWISE(NAME, F, double, f64)   \
    POINTWISE(NAME, F, bf16, bf16)
ALL_FLOATS(silu, Silu)
ALL_FLOATS(gelu_exact, GeluExact)
ALL_FLOATS(gelu_tanh, GeluTanh)
