// Dropout: y = x keep / (1 - p), where an element is kept when the draw of its global index, a word of the counter-based
// generator, is not below the threshold; the same marks as dropout.rs. Bytes moved, of s bytes an element: forward
// (2 s + 1) n, from a mask the same, mask alone n. A counter gives four draws for about 90 integer instructions, some 25
// an element: the floor is the larger of the bytes over the memory's bandwidth and these over the integer units (in bf16
// the two are of the same size; making a mask alone is bound by the second).

// Marks of COUNT elements from global index `index` on, which is a multiple of COUNT or of 4.
template <int COUNT> DEVICE void draw(u64 index, u64 purpose, u64 seed, u32 threshold, u8 (&marks)[COUNT]) {
    constexpr int PART = COUNT < 4 ? COUNT : 4;
#pragma unroll
    for (int part = 0; part < COUNT; part += PART) {
        Words words = philox((index + part) >> 2, purpose, seed);
        bool upper = PART == 2 && (index & 2);
        if (upper) {
            words.w[0] = words.w[2];
            words.w[1] = words.w[3];
        }
#pragma unroll
        for (int i = 0; i < PART; i++) marks[part + i] = words.w[i] >= threshold;
    }
}
DEVICE u8 draw_one(u64 index, u64 purpose, u64 seed, u32 threshold) {
    Words words = philox(index >> 2, purpose, seed);
    u32 low = index & 1 ? words.w[1] : words.w[0], high = index & 1 ? words.w[3] : words.w[2];
    return (index & 2 ? high : low) >= threshold;
}

// COUNT marks as one access; the address is a multiple of COUNT.
template <int COUNT> struct Marks;
template <> struct Marks<2> { typedef u16 type; };
template <> struct Marks<4> { typedef u32 type; };
template <> struct Marks<8> { typedef uint2 type; };
template <> struct Marks<16> { typedef uint4 type; };
template <int COUNT> DEVICE void store_marks(u8* to, const u8 (&marks)[COUNT]) {
    typename Marks<COUNT>::type raw;
    memcpy(&raw, marks, COUNT);
    *reinterpret_cast<typename Marks<COUNT>::type*>(to) = raw;
}
template <int COUNT> DEVICE void load_marks(const u8* from, u8 (&marks)[COUNT]) {
    typename Marks<COUNT>::type raw = *reinterpret_cast<const typename Marks<COUNT>::type*>(from);
    memcpy(marks, &raw, COUNT);
}

KERNEL __launch_bounds__(256) void dropout_mask(u8* mask, i64 n, u64 first, u64 purpose, u64 seed, u32 threshold) {
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = is_aligned_16(mask) && first % 16 == 0 ? n / 16 : 0;
    for (i64 p = thread; p < packs; p += stride) {
        u8 marks[16];
        draw(first + 16 * p, purpose, seed, threshold, marks);
        store_marks(mask + 16 * p, marks);
    }
    for (i64 i = 16 * packs + thread; i < n; i += stride) mask[i] = draw_one(first + i, purpose, seed, threshold);
}
EXPORT(dropout_mask)

template <class T> DEVICE T dropped(T x, u8 mark, acc_t<T> scale) {
    return from_acc<T>(mark ? to_acc(x) * scale : acc_t<T>(0));
}

template <class T>
DEVICE void forward(const T* x, T* y, u8* mask, i64 n, u64 first, u64 purpose, u64 seed, u32 threshold, acc_t<T> scale) {
    constexpr int COUNT = Pack<T>::COUNT;
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    bool packed = is_aligned_16(x) && is_aligned_16(y) && is_aligned_16(mask) && first % 16 == 0;
    i64 packs = packed ? n / COUNT : 0;
    for (i64 p = thread; p < packs; p += stride) {
        Pack<T> a = load_pack(x + p * COUNT);
        u8 marks[COUNT];
        draw(first + p * COUNT, purpose, seed, threshold, marks);
        for (int i = 0; i < COUNT; i++) a.v[i] = dropped(a.v[i], marks[i], scale);
        store_pack(y + p * COUNT, a);
        store_marks(mask + p * COUNT, marks);
    }
    for (i64 i = packs * COUNT + thread; i < n; i += stride) {
        u8 mark = draw_one(first + i, purpose, seed, threshold);
        mask[i] = mark;
        y[i] = dropped(x[i], mark, scale);
    }
}

template <class T> DEVICE void apply(const T* x, const u8* mask, T* y, i64 n, acc_t<T> scale) {
    constexpr int COUNT = Pack<T>::COUNT;
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, stride = i64(gridDim.x) * blockDim.x;
    i64 packs = is_aligned_16(x) && is_aligned_16(y) && is_aligned_16(mask) ? n / COUNT : 0;
    for (i64 p = thread; p < packs; p += stride) {
        Pack<T> a = load_pack(x + p * COUNT);
        u8 marks[COUNT];
        load_marks(mask + p * COUNT, marks);
        for (int i = 0; i < COUNT; i++) a.v[i] = dropped(a.v[i], marks[i], scale);
        store_pack(y + p * COUNT, a);
    }
    for (i64 i = packs * COUNT + thread; i < n; i += stride) y[i] = dropped(x[i], mask[i], scale);
}

#define DROPOUT(T, TYPE)                                                                                              \
    KERNEL __launch_bounds__(256, 1) void dropout_forward_##TYPE(const T* x, T* y, u8* mask, i64 n, u64 first,        \
                                                                 u64 purpose, u64 seed, u32 threshold,                \
                                                                 acc_t<T> scale) {                                    \
        forward(x, y, mask, n, first, purpose, seed, threshold, scale);                                               \
    }                                                                                                                 \
    EXPORT(dropout_forward_##TYPE)                                                                                    \
    KERNEL __launch_bounds__(256, 1) void dropout_apply_##TYPE(const T* x, const u8* mask, T* y, i64 n,               \
                                                               acc_t<T> scale) {                                      \
        apply(x, mask, y, n, scale);                                                                                  \
    }                                                                                                                 \
    EXPORT(dropout_apply_##TYPE)
DROPOUT(float, f32)
DROPOUT(double, f64)
DROPOUT(bf16, bf16)
