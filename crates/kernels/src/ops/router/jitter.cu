// Noise on a router's input: y = x (1 + epsilon u) with u of the element's index in the global batch; a block a row.
// Bytes moved: 2 t d s + 8 t. Each element takes a counter of its own, about 100 integer instructions: the floor is
// that over the integer units, above the time of the bytes.

template <class T>
DEVICE void jitter(const T* x, const u64* indices, T* y, i64 rows, i64 width, u64 purpose, u64 seed, double epsilon) {
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        u64 first = indices[t] * u64(width);
        for (i64 j = threadIdx.x; j < width; j += blockDim.x) {
            Words words = philox(first + u64(j), purpose, seed);
            u64 bits = (u64(words.w[0]) | u64(words.w[1]) << 32) >> 11;
            double u = 2.0 * (double(bits) * (1.0 / 9007199254740992.0)) - 1.0;
            y[t * width + j] = from_acc<T>(to_acc(x[t * width + j]) * acc_t<T>(1.0 + epsilon * u));
        }
    }
}

#define JITTER(T, TYPE)                                                                                                \
    KERNEL __launch_bounds__(256) void jitter_##TYPE(const T* x, const u64* indices, T* y, i64 rows, i64 width,          \
                                                     u64 purpose, u64 seed, double epsilon) {                          \
        jitter(x, indices, y, rows, width, purpose, seed, epsilon);                                                    \
    }                                                                                                                  \
    EXPORT(jitter_##TYPE)
JITTER(float, f32)
JITTER(double, f64)
JITTER(bf16, bf16)
