// AdamW in one pass: master weight, both moments and gradient are read once, the first three written once: 28 bytes a
// parameter in f32, 30 with weights in bf16 (56 and 64 in f64); the floor is that over the memory's bandwidth. Packs of
// 16 bytes where all addresses are multiples of 16. Products are rounded before they are added, roots and quotients are
// exact to the last bit, so that results have the bits of the CPU.

namespace adamw {

template <class A> struct Factors {
    A keep, clip, beta1, rest1, beta2, rest2, rate, inverse_root, eps;
    DEVICE_MEMBER void apply(A& w, A& m, A& v, A grad) const {
        A g = grad * clip;
        m = mul_rn(beta1, m) + mul_rn(rest1, g);
        v = mul_rn(beta2, v) + mul_rn(rest2, g * g);
        w = mul_rn(w, keep) - rate * m / (mul_rn(sqrt_of(v), inverse_root) + eps);
    }
};

// `weight` becomes the new master weights rounded to its type, where there is one.
template <class T>
DEVICE void update(acc_t<T>* master, acc_t<T>* m, acc_t<T>* v, const acc_t<T>* grad, i64 n, T* weight,
                   Factors<acc_t<T>> factors) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT, PART = Pack<A>::COUNT;
    i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    bool packed = is_aligned_16(master) && is_aligned_16(m) && is_aligned_16(v) && is_aligned_16(grad) &&
                  is_aligned_16(weight);
    i64 packs = packed ? n / COUNT : 0;
    for (i64 p = first; p < packs; p += stride) {
        Pack<T> rounded;
        for (int start = 0; start < COUNT; start += PART) {
            i64 at = p * COUNT + start;
            Pack<A> w = load_pack(master + at), first_moment = load_pack(m + at), second_moment = load_pack(v + at);
            Pack<A> g = load_pack(grad + at);
            for (int i = 0; i < PART; i++) {
                factors.apply(w.v[i], first_moment.v[i], second_moment.v[i], g.v[i]);
                rounded.v[start + i] = from_acc<T>(w.v[i]);
            }
            store_pack(master + at, w);
            store_pack(m + at, first_moment);
            store_pack(v + at, second_moment);
        }
        if (weight) store_pack(weight + p * COUNT, rounded);
    }
#pragma unroll 1
    for (i64 i = packs * COUNT + first; i < n; i += stride) {
        factors.apply(master[i], m[i], v[i], grad[i]);
        if (weight) weight[i] = from_acc<T>(master[i]);
    }
}

}  // namespace adamw

#define ADAMW(T, TYPE)                                                                                              \
    KERNEL __launch_bounds__(256) void adamw_##TYPE(                                                                  \
        acc_t<T>* master, acc_t<T>* m, acc_t<T>* v, const acc_t<T>* grad, i64 n, T* weight, acc_t<T> keep,          \
        acc_t<T> clip, acc_t<T> beta1, acc_t<T> rest1, acc_t<T> beta2, acc_t<T> rest2, acc_t<T> rate,               \
        acc_t<T> inverse_root, acc_t<T> eps) {                                                                      \
        adamw::update(master, m, v, grad, n, weight,                                                                \
                      adamw::Factors<acc_t<T>>{keep, clip, beta1, rest1, beta2, rest2, rate, inverse_root, eps});   \
    }                                                                                                               \
    EXPORT(adamw_##TYPE)
ADAMW(float, f32)
ADAMW(double, f64)
ADAMW(bf16, bf16)
