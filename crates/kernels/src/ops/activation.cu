// Gated units with an optional weight a row: h = w silu(g) u with all gates before all ups in a row of 2 f columns, and
// the clamped unit h = w (u + 1) g sigmoid(alpha g), g <= limit, |u| <= limit, on alternating columns. Bytes moved, of s
// bytes an element: forward 3 f s a row, backward 5 f s a row, in one pass that also sums the gradient by the row's weight
// (a group of threads takes a row). The floor is these bytes over the memory's bandwidth.

template <class A> DEVICE A sigmoid(A x) { return A(1) / (A(1) + exp_of(-x)); }

// Value of the unit, and its derivatives by gate and up.
template <class A> struct Values {
    A h, by_gate, by_up;
};

template <class A> struct Silu {
    static constexpr bool INTERLEAVED = false;
    DEVICE_MEMBER A value(A gate, A up) const { return gate * sigmoid(gate) * up; }
    DEVICE_MEMBER Values<A> derivatives(A gate, A up) const {
        A s = sigmoid(gate), silu = gate * s;
        Values<A> v = {silu * up, up * (s + silu * (A(1) - s)), silu};
        return v;
    }
};

template <class A> struct Clamped {
    static constexpr bool INTERLEAVED = true;
    A limit, alpha;
    DEVICE_MEMBER A clamped_gate(A gate) const { return gate > limit ? limit : gate; }
    DEVICE_MEMBER A clamped_up(A up) const {
        A u = up > limit ? limit : up;
        return u < -limit ? -limit : u;
    }
    DEVICE_MEMBER A value(A gate, A up) const {
        A g = clamped_gate(gate);
        return (clamped_up(up) + A(1)) * g * sigmoid(alpha * g);
    }
    DEVICE_MEMBER Values<A> derivatives(A gate, A up) const {
        A g = clamped_gate(gate), u = clamped_up(up), s = sigmoid(alpha * g), swish = g * s;
        A by_gate = (u + A(1)) * (s + alpha * swish * (A(1) - s));
        Values<A> v = {(u + A(1)) * swish, gate > limit ? A(0) : by_gate, up > limit || up < -limit ? A(0) : swish};
        return v;
    }
};

// Gates and ups of the COUNT units from `first` on.
template <class T, bool INTERLEAVED, bool PACKED> struct Pairs {
    static constexpr int COUNT = Pack<T>::COUNT;
    Pack<T> a, b;
    DEVICE_MEMBER void load(const T* row, int first, int f) {
        int place = INTERLEAVED ? 2 * first : first;
        a = load_part<T, PACKED>(row, place, INTERLEAVED ? 2 * f : f);
        b = INTERLEAVED ? load_part<T, PACKED>(row, place + COUNT, 2 * f) : load_part<T, PACKED>(row + f, place, f);
    }
    DEVICE_MEMBER void store(T* row, int first, int f) const {
        int place = INTERLEAVED ? 2 * first : first;
        store_part<T, PACKED>(row, place, INTERLEAVED ? 2 * f : f, a);
        if (INTERLEAVED) store_part<T, PACKED>(row, place + COUNT, 2 * f, b);
        else store_part<T, PACKED>(row + f, place, f, b);
    }
    DEVICE_MEMBER T& gate(int i) {
        if (!INTERLEAVED) return a.v[i];
        return 2 * i < COUNT ? a.v[2 * i] : b.v[2 * i - COUNT];
    }
    DEVICE_MEMBER T& up(int i) {
        if (!INTERLEAVED) return b.v[i];
        return 2 * i < COUNT ? a.v[2 * i + 1] : b.v[2 * i + 1 - COUNT];
    }
};

template <class T, bool PACKED, class G>
DEVICE void forward(const G& unit, const T* gate_up, const acc_t<T>* weights, T* h, i64 rows, int f, int lanes) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    for (i64 row = i64(blockIdx.x) * group.count + group.index; row < rows; row += i64(gridDim.x) * group.count) {
        A weight = weights ? weights[row] : A(1);
#pragma unroll 2
        for (int first = group.lane * COUNT; first < f; first += lanes * COUNT) {
            Pairs<T, G::INTERLEAVED, PACKED> pairs;
            pairs.load(gate_up + row * 2 * f, first, f);
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                out.v[i] = from_acc<T>(unit.value(to_acc(pairs.gate(i)), to_acc(pairs.up(i))) * weight);
            store_part<T, PACKED>(h + row * f, first, f, out);
        }
    }
}

template <class T> struct Backward {
    const T *dh, *gate_up;
    const acc_t<T>* weights;
    T* d_gate_up;
    acc_t<T>* d_weights;
    i64 rows;
    int f;
};

template <class T, bool PACKED, class G>
DEVICE void backward(const G& unit, const Backward<T>& b, int lanes, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    int f = b.f;
    for (i64 start = i64(blockIdx.x) * group.count; start < b.rows; start += i64(gridDim.x) * group.count) {
        i64 row = start + group.index;
        bool inside = row < b.rows;
        A weight = inside && b.weights ? b.weights[row] : A(1), sum = 0;
#pragma unroll 1
        for (int first = group.lane * COUNT; inside && first < f; first += lanes * COUNT) {
            Pairs<T, G::INTERLEAVED, PACKED> pairs;
            pairs.load(b.gate_up + row * 2 * f, first, f);
            Pack<T> dh = load_part<T, PACKED>(b.dh + row * f, first, f);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                Values<A> v = unit.derivatives(to_acc(pairs.gate(i)), to_acc(pairs.up(i)));
                A d = to_acc(dh.v[i]);
                sum += d * v.h;
                pairs.gate(i) = from_acc<T>(d * weight * v.by_gate);
                pairs.up(i) = from_acc<T>(d * weight * v.by_up);
            }
            pairs.store(b.d_gate_up + row * 2 * f, first, f);
        }
        if (b.d_weights) {
            sum = group_sum(sum, group, scratch);
            if (inside && group.lane == 0) b.d_weights[row] = sum;
        }
    }
}

// UNIT and what it is made of; a unit without settings leaves the last two arguments alone.
#define GATED(NAME, T, TYPE, UNIT, ...)                                                                               \
    KERNEL __launch_bounds__(512, 1) void NAME##_forward_##TYPE(const T* gate_up, const acc_t<T>* weights, T* h,      \
                                                                i64 rows, i64 f, int lanes, acc_t<T> limit,           \
                                                                acc_t<T> alpha) {                                     \
        UNIT<acc_t<T>> unit = {__VA_ARGS__};                                                                          \
        if (f % Pack<T>::COUNT == 0 && is_aligned_16(gate_up) && is_aligned_16(h))                                    \
            forward<T, true>(unit, gate_up, weights, h, rows, int(f), lanes);                                         \
        else                                                                                                          \
            forward<T, false>(unit, gate_up, weights, h, rows, int(f), lanes);                                        \
    }                                                                                                                 \
    EXPORT(NAME##_forward_##TYPE)                                                                                     \
    KERNEL __launch_bounds__(512, 1) void NAME##_backward_##TYPE(                                                     \
        const T* dh, const T* gate_up, const acc_t<T>* weights, T* d_gate_up, acc_t<T>* d_weights, i64 rows, i64 f,   \
        int lanes, acc_t<T> limit, acc_t<T> alpha) {                                                                  \
        SHARED(acc_t<T>, scratch, 32);                                                                                \
        UNIT<acc_t<T>> unit = {__VA_ARGS__};                                                                          \
        Backward<T> b = {dh, gate_up, weights, d_gate_up, d_weights, rows, int(f)};                                   \
        if (f % Pack<T>::COUNT == 0 && is_aligned_16(dh) && is_aligned_16(gate_up) && is_aligned_16(d_gate_up))       \
            backward<T, true>(unit, b, lanes, scratch);                                                               \
        else                                                                                                          \
            backward<T, false>(unit, b, lanes, scratch);                                                              \
    }                                                                                                                 \
    EXPORT(NAME##_backward_##TYPE)
GATED(swiglu, float, f32, Silu)
GATED(swiglu, double, f64, Silu)
GATED(swiglu, bf16, bf16, Silu)
GATED(clamped_swiglu, float, f32, Clamped, limit, alpha)
GATED(clamped_swiglu, double, f64, Clamped, limit, alpha)
GATED(clamped_swiglu, bf16, bf16, Clamped, limit, alpha)
