// Cross-entropy of logits [t, v]: a block has a row, a thread packs of 16 bytes of it. The pieces of a cut vocabulary
// read the logits once each (t v s bytes); the gradient reads and writes them. The fused functions keep a running
// maximum and sum (Milakov and Gimelshein 2018), so that losses need one read; the gradient in place reads a row a
// second time right after the first, when it lies in the second-level cache as long as that holds the rows under way
// (35 MB for two blocks on each of 132 multiprocessors and 32,768 classes in f32); beyond, part of them is read from
// memory twice. Floors: t v s bytes over the bandwidth for losses, 2 t v s with the gradient.

constexpr int IGNORED = -100;

namespace cross_entropy {

// sum of e^(x - max) so far, and max.
template <class A> struct Running {
    A max, sum;
    DEVICE_MEMBER void add(const A* x, int count) {
        A largest = max;
        for (int i = 0; i < count; i++) largest = max_of(largest, x[i]);
        // Nothing but -inf so far: any finite shift gives zeros, and lets a NaN through.
        A shift = largest == -infinity<A>() ? A(0) : largest;
        A total = sum * exp_of(max - shift);
        for (int i = 0; i < count; i++) total += exp_of(x[i] - shift);
        max = largest;
        sum = total;
    }
};

// Calls f(first column, values, count) for the columns of the calling thread.
template <class T, class F> DEVICE void for_own_columns(const T* row, i64 columns, bool packed, F f) {
    constexpr int COUNT = Pack<T>::COUNT;
    i64 packs = packed ? columns / COUNT : 0;
    for (i64 p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack<T> pack = load_pack(row + p * COUNT);
        acc_t<T> x[COUNT];
        for (int i = 0; i < COUNT; i++) x[i] = to_acc(pack.v[i]);
        f(p * COUNT, x, COUNT);
    }
#pragma unroll 1
    for (i64 c = packs * COUNT + threadIdx.x; c < columns; c += blockDim.x) {
        acc_t<T> x = to_acc(row[c]);
        f(c, &x, 1);
    }
}

// Maximum and sum of a row, the same on every thread.
template <class T> DEVICE Running<acc_t<T>> softmax_of_row(const T* row, i64 columns, bool packed, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    Running<A> own = {-infinity<A>(), A(0)};
    for_own_columns(row, columns, packed, [&own](i64, const A* x, int count) { own.add(x, count); });
    A max = block_max(own.max, scratch);
    A shift = max == -infinity<A>() ? A(0) : max;
    return {max, block_sum(own.sum * exp_of(own.max - shift), scratch)};
}

// row -> factor e^(x - max), `scale` less at the target; zeros behind the valid columns.
template <class T>
DEVICE void gradient_of_row(T* row, i64 columns, i64 valid, bool packed, acc_t<T> max, acc_t<T> factor, i64 target,
                            acc_t<T> scale) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    for_own_columns((const T*)row, valid, packed, [=](i64 first, const A* x, int count) {
        Pack<T> pack;
        for (int i = 0; i < count; i++) {
            A y = mul_rn(exp_of(x[i] - max), factor);
            pack.v[i] = from_acc<T>(first + i == target ? y - scale : y);
        }
        if (count == COUNT) store_pack(row + first, pack);
        else row[first] = pack.v[0];
    });
    for (i64 c = valid + threadIdx.x; c < columns; c += blockDim.x) row[c] = from_acc<T>(A(0));
}

template <class T> DEVICE void fill_row(T* row, i64 columns, acc_t<T> value) {
    for (i64 c = threadIdx.x; c < columns; c += blockDim.x) row[c] = from_acc<T>(value);
}

// Column of the slice that a target stands for, or -1.
DEVICE i64 local_column(int target, i64 first_id, i64 valid) {
    i64 column = target - first_id;
    return target >= 0 && column >= 0 && column < valid ? column : -1;
}

template <class T> DEVICE bool rows_are_packed(const T* logits, i64 columns) {
    return columns % Pack<T>::COUNT == 0 && is_aligned_16(logits);
}

template <class T> DEVICE void maxima(const T* logits, i64 rows, i64 columns, i64 valid, acc_t<T>* max_t) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    bool packed = rows_are_packed(logits, columns);
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        A largest = -infinity<A>();
        for_own_columns(logits + t * columns, valid, packed, [&largest](i64, const A* x, int count) {
            for (int i = 0; i < count; i++) largest = max_of(largest, x[i]);
        });
        largest = block_max(largest, &scratch[0]);
        if (threadIdx.x == 0) max_t[t] = largest;
    }
}

template <class T>
DEVICE void sums(const T* logits, i64 rows, i64 columns, i64 valid, const acc_t<T>* max_t, const int* targets,
                 i64 first_id, acc_t<T>* sum_exp, acc_t<T>* target_logit) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    bool packed = rows_are_packed(logits, columns);
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        const T* row = logits + t * columns;
        A max = max_t[t], sum = 0;
        for_own_columns(row, valid, packed, [&sum, max](i64, const A* x, int count) {
            for (int i = 0; i < count; i++) sum += exp_of(x[i] - max);
        });
        sum = block_sum(sum, &scratch[0]);
        if (threadIdx.x == 0) {
            i64 column = local_column(targets[t], first_id, valid);
            sum_exp[t] = sum;
            target_logit[t] = column < 0 ? A(0) : to_acc(row[column]);
        }
    }
}

template <class A>
DEVICE void losses(const A* max_t, const A* sum_exp, const A* target_logit, const int* targets, A* nll_t, i64 rows) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 t = blockIdx.x * i64(blockDim.x) + threadIdx.x; t < rows; t += stride)
        nll_t[t] = targets[t] == IGNORED ? A(0) : (max_t[t] - target_logit[t]) + log_of(sum_exp[t]);
}

template <class T>
DEVICE void backward(T* logits, i64 rows, i64 columns, i64 valid, const acc_t<T>* max_t, const acc_t<T>* sum_exp,
                     const int* targets, i64 first_id, acc_t<T> scale) {
    bool packed = rows_are_packed(logits, columns);
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        T* row = logits + t * columns;
        if (targets[t] == IGNORED) fill_row(row, columns, 0);
        else
            gradient_of_row(row, columns, valid, packed, max_t[t], scale / sum_exp[t],
                            local_column(targets[t], first_id, valid), scale);
    }
}

// A target that is none gives NaN.
template <class T>
DEVICE void forward(const T* logits, i64 rows, i64 columns, const int* targets, acc_t<T>* nll_t, acc_t<T>* lse_t) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    bool packed = rows_are_packed(logits, columns);
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        const T* row = logits + t * columns;
        Running<A> all = softmax_of_row(row, columns, packed, &scratch[0]);
        if (threadIdx.x == 0) {
            i64 column = local_column(targets[t], 0, columns);
            A nll = infinity<A>() - infinity<A>();
            if (targets[t] == IGNORED) nll = 0;
            if (column >= 0) nll = (all.max - to_acc(row[column])) + log_of(all.sum);
            lse_t[t] = all.max + log_of(all.sum);
            nll_t[t] = nll;
        }
    }
}

template <class T>
DEVICE void in_place(T* logits, i64 rows, i64 columns, i64 valid, const int* targets, acc_t<T> scale, acc_t<T>* nll_t) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    bool packed = rows_are_packed(logits, columns);
    for (i64 t = blockIdx.x; t < rows; t += gridDim.x) {
        T* row = logits + t * columns;
        i64 column = local_column(targets[t], 0, valid);
        if (column < 0) {
            A value = targets[t] == IGNORED ? A(0) : infinity<A>() - infinity<A>();
            fill_row(row, columns, value);
            if (threadIdx.x == 0) nll_t[t] = value;
            continue;
        }
        // Read before the barriers, behind which it is overwritten.
        A target_logit = to_acc(row[column]);
        Running<A> all = softmax_of_row((const T*)row, valid, packed, &scratch[0]);
        if (threadIdx.x == 0) nll_t[t] = (all.max - target_logit) + log_of(all.sum);
        gradient_of_row(row, columns, valid, packed, all.max, scale / all.sum, column, scale);
    }
}

}  // namespace cross_entropy

#define CROSS_ENTROPY(T, TYPE, BOUNDS)                                                                                \
    KERNEL __launch_bounds__ BOUNDS void ce_max_##TYPE(const T* logits, i64 rows, i64 columns, i64 valid,             \
                                                      acc_t<T>* max_t) {                                              \
        cross_entropy::maxima(logits, rows, columns, valid, max_t);                                                   \
    }                                                                                                                 \
    EXPORT(ce_max_##TYPE)                                                                                             \
    KERNEL __launch_bounds__ BOUNDS void ce_sum_exp_##TYPE(                                                           \
        const T* logits, i64 rows, i64 columns, i64 valid, const acc_t<T>* max_t, const int* targets, i64 first_id,   \
        acc_t<T>* sum_exp, acc_t<T>* target_logit) {                                                                  \
        cross_entropy::sums(logits, rows, columns, valid, max_t, targets, first_id, sum_exp, target_logit);           \
    }                                                                                                                 \
    EXPORT(ce_sum_exp_##TYPE)                                                                                         \
    KERNEL __launch_bounds__ BOUNDS void ce_backward_##TYPE(                                                          \
        T* logits, i64 rows, i64 columns, i64 valid, const acc_t<T>* max_t, const acc_t<T>* sum_exp,                  \
        const int* targets, i64 first_id, acc_t<T> scale) {                                                           \
        cross_entropy::backward(logits, rows, columns, valid, max_t, sum_exp, targets, first_id, scale);              \
    }                                                                                                                 \
    EXPORT(ce_backward_##TYPE)                                                                                        \
    KERNEL __launch_bounds__ BOUNDS void ce_forward_##TYPE(const T* logits, i64 rows, i64 columns, const int* targets,\
                                                          acc_t<T>* nll_t, acc_t<T>* lse_t) {                         \
        cross_entropy::forward(logits, rows, columns, targets, nll_t, lse_t);                                         \
    }                                                                                                                 \
    EXPORT(ce_forward_##TYPE)                                                                                         \
    KERNEL __launch_bounds__ BOUNDS void ce_in_place_##TYPE(T* logits, i64 rows, i64 columns, i64 valid,              \
                                                           const int* targets, acc_t<T> scale, acc_t<T>* nll_t) {     \
        cross_entropy::in_place(logits, rows, columns, valid, targets, scale, nll_t);                                 \
    }                                                                                                                 \
    EXPORT(ce_in_place_##TYPE)
CROSS_ENTROPY(float, f32, (1024))
CROSS_ENTROPY(double, f64, (512, 1))
CROSS_ENTROPY(bf16, bf16, (1024))

#define LOSSES(A, TYPE)                                                                                        \
    KERNEL __launch_bounds__(256) void ce_nll_##TYPE(const A* max_t, const A* sum_exp, const A* target_logit,   \
                                                     const int* targets, A* nll_t, i64 rows) {                 \
        cross_entropy::losses(max_t, sum_exp, target_logit, targets, nll_t, rows);                             \
    }                                                                                                          \
    EXPORT(ce_nll_##TYPE)
LOSSES(float, f32)
LOSSES(double, f64)
