// Attention that keeps its matrix of probabilities: products a sequence and head at a time on ordinary cores, the softmax
// over visible keys with dropout of what it gives, and its backward. b sequences of s rows, h heads; matrices are
// [b, h, s, s], rows [b s, heads, width].
//
// A product of one kind is 2 b h s^2 d flops, whatever is hidden, and reads or writes a matrix (a bytes an element: its
// type) and rows; below a width of some hundreds the matrix is the floor: b h s^2 a over the bandwidth. The softmax reads
// the scores (f32; three times, from caches after the first) and writes probabilities, with dropout also the mask and
// what stays: b h s^2 (4 + 2) or (4 + 2 + 1 + 2) bytes in bf16, its backward b h s^2 (4 + 4 + 2 + 1). Sums have a fixed
// order; the query heads of a key head are added one after the other.

constexpr int SIDE = 64, DEPTH = 16, SIDE_ROW = SIDE + 1;

// A tile [64, 64] of a matrix product: sum[i][j] += left(row, k) right(k, column) over k < depth, for rows y + 16 i and
// columns x + 16 j of the tile, 256 threads. The operands give 0 outside. ROW_FAST: neighbours of `left` in memory are
// rows; COLUMN_FAST: those of `right` are columns.
template <bool ROW_FAST, bool COLUMN_FAST, class A, class L, class R>
DEVICE void add_products(A (&sum)[4][4], i64 first_row, i64 first_column, i64 depth, const L& left, const R& right) {
    SHARED(A, a, DEPTH * SIDE_ROW);
    SHARED(A, b, DEPTH * SIDE_ROW);
    int x = threadIdx.x & 15, y = threadIdx.x >> 4;
    for (i64 start = 0; start < depth; start += DEPTH) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            int e = threadIdx.x + 256 * part;
            int side = e % SIDE, deep = e / SIDE, other_deep = e % DEPTH, other_side = e / DEPTH;
            if (ROW_FAST) a[deep * SIDE_ROW + side] = left(first_row + side, start + deep);
            else a[other_deep * SIDE_ROW + other_side] = left(first_row + other_side, start + other_deep);
            if (COLUMN_FAST) b[deep * SIDE_ROW + side] = right(start + deep, first_column + side);
            else b[other_deep * SIDE_ROW + other_side] = right(start + other_deep, first_column + other_side);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            A l[4], r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) l[i] = a[k * SIDE_ROW + y + 16 * i];
#pragma unroll
            for (int j = 0; j < 4; j++) r[j] = b[k * SIDE_ROW + x + 16 * j];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += l[i] * r[j];
        }
        __syncthreads();
    }
}

// Rows of a sequence and head of [b s, heads, width].
template <class T> struct HeadRows {
    const T* data;
    i64 stride, s, width;
    DEVICE_MEMBER HeadRows(const T* tensor, i64 s, i64 heads, i64 width, i64 sequence, i64 head)
        : data(tensor + (sequence * s * heads + head) * width), stride(heads * width), s(s), width(width) {}
    DEVICE_MEMBER acc_t<T> at(i64 row, i64 column) const {
        return row < s && column < width ? to_acc(data[row * stride + column]) : acc_t<T>(0);
    }
};
// The matrix of a sequence and head of [b, heads, s, s].
template <class T> struct HeadMatrix {
    const T* data;
    i64 s;
    DEVICE_MEMBER HeadMatrix(const T* tensor, i64 s, i64 heads, i64 sequence, i64 head) : data(tensor + (sequence * heads + head) * s * s), s(s) {}
    DEVICE_MEMBER acc_t<T> at(i64 row, i64 column) const { return row < s && column < s ? to_acc(data[row * s + column]) : acc_t<T>(0); }
};

// The tile's place: which sequence and head, which rows and columns.
struct Place {
    i64 sequence, head, row, column;
};
DEVICE Place place_of(i64 item, i64 heads, i64 rows, i64 columns) {
    i64 down = ceil_div(rows, SIDE), across = ceil_div(columns, SIDE), tile = item % (down * across), matrix = item / (down * across);
    return {matrix / heads, matrix % heads, tile / across * SIDE, tile % across * SIDE};
}
template <class A> DEVICE void clear(A (&sum)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = 0;
}
// Calls f(row, column, value) for what lies inside rows x columns.
template <class A, class F> DEVICE void each(const A (&sum)[4][4], const Place& at, i64 rows, i64 columns, F f) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            i64 row = at.row + (threadIdx.x >> 4) + 16 * i, column = at.column + (threadIdx.x & 15) + 16 * j;
            if (row < rows && column < columns) f(row, column, sum[i][j]);
        }
}

// matrix [b, heads, s, s] = x y^T: x has the heads, y those of the keys.
template <class T>
DEVICE void rows_by_rows(const T* x, const T* y, acc_t<T>* matrix, i64 b, i64 s, i64 heads, i64 group, i64 width) {
    i64 tiles = ceil_div(s, SIDE);
    for (i64 item = blockIdx.x; item < b * heads * tiles * tiles; item += gridDim.x) {
        Place at = place_of(item, heads, s, s);
        HeadRows<T> own(x, s, heads, width, at.sequence, at.head), other(y, s, heads / group, width, at.sequence, at.head / group);
        acc_t<T> sum[4][4];
        clear(sum);
        add_products<false, false>(sum, at.row, at.column, width, [&](i64 i, i64 k) { return own.at(i, k); },
                                   [&](i64 k, i64 j) { return other.at(j, k); });
        acc_t<T>* to = matrix + (at.sequence * heads + at.head) * s * s;
        each(sum, at, s, s, [&](i64 i, i64 j, acc_t<T> value) { to[i * s + j] = value; });
    }
}

// rows [b s, heads, width] = matrix y: y has the heads of the keys.
template <class M, class T>
DEVICE void matrix_by_rows(const M* matrix, const T* y, T* rows, i64 b, i64 s, i64 heads, i64 group, i64 width) {
    i64 tiles = ceil_div(s, SIDE) * ceil_div(width, SIDE);
    for (i64 item = blockIdx.x; item < b * heads * tiles; item += gridDim.x) {
        Place at = place_of(item, heads, s, width);
        HeadMatrix<M> own(matrix, s, heads, at.sequence, at.head);
        HeadRows<T> other(y, s, heads / group, width, at.sequence, at.head / group);
        acc_t<T> sum[4][4];
        clear(sum);
        add_products<false, true>(sum, at.row, at.column, s, [&](i64 i, i64 k) { return own.at(i, k); },
                                  [&](i64 k, i64 j) { return other.at(k, j); });
        each(sum, at, s, width, [&](i64 i, i64 j, acc_t<T> value) {
            rows[((at.sequence * s + i) * heads + at.head) * width + j] = from_acc<T>(value);
        });
    }
}

// rows [b s, kv_heads, width] = matrix^T x, summed over the heads of a group.
template <class M, class T>
DEVICE void turned_by_rows(const M* matrix, const T* x, T* rows, i64 b, i64 s, i64 heads, i64 group, i64 width) {
    i64 kv_heads = heads / group, tiles = ceil_div(s, SIDE) * ceil_div(width, SIDE);
    for (i64 item = blockIdx.x; item < b * kv_heads * tiles; item += gridDim.x) {
        Place at = place_of(item, kv_heads, s, width);
        acc_t<T> sum[4][4];
        clear(sum);
        for (i64 head = at.head * group; head < (at.head + 1) * group; head++) {
            HeadMatrix<M> own(matrix, s, heads, at.sequence, head);
            HeadRows<T> other(x, s, heads, width, at.sequence, head);
            add_products<true, true>(sum, at.row, at.column, s, [&](i64 i, i64 k) { return own.at(k, i); },
                                     [&](i64 k, i64 j) { return other.at(k, j); });
        }
        each(sum, at, s, width, [&](i64 i, i64 j, acc_t<T> value) {
            rows[((at.sequence * s + i) * kv_heads + at.head) * width + j] = from_acc<T>(value);
        });
    }
}

// What drops probabilities: an element's index is ((token of the global batch) all_heads + head of the model) s + key.
struct Dropping {
    u64 first_token, first_head, all_heads, purpose, seed;
    u32 threshold;
};

// probabilities = softmax(scale scores) over the run of keys that a row sees, 0 elsewhere; a warp a row. With `mask` also
// the marks and what stays of the probabilities, times `keep`.
template <class T>
DEVICE void softmax(const acc_t<T>* scores, const int* runs, T* probabilities, u8* mask, T* dropped, i64 rows, i64 s, i64 heads,
                    acc_t<T> scale, acc_t<T> keep, const Dropping& dropping) {
    typedef acc_t<T> A;
    i64 stride = i64(gridDim.x) * (blockDim.x >> 5);
    int lane = threadIdx.x & 31;
    for (i64 row = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); row < rows; row += stride) {
        i64 first = row / s / heads * s, position = row % s, token = first + position;
        int begin = int(runs[2 * token] - first), end = int(runs[2 * token + 1] - first);
        const A* from = scores + row * s;
        A best = -infinity<A>(), sum = 0;
        for (int c = begin + lane; c < end; c += 32) best = max_of(best, from[c] * scale);
        best = warp_max(best);
        for (int c = begin + lane; c < end; c += 32) sum += exp_of(from[c] * scale - best);
        sum = warp_sum(sum);
        u64 index = ((dropping.first_token + u64(token)) * dropping.all_heads + dropping.first_head + u64(row / s % heads)) * u64(s);
        for (int c = lane; c < s; c += 32) {
            T p = from_acc<T>(c >= begin && c < end ? exp_of(from[c] * scale - best) / sum : A(0));
            probabilities[row * s + c] = p;
            if (!mask) continue;
            Words words = philox((index + c) >> 2, dropping.purpose, dropping.seed);
            u32 low = (index + c) & 1 ? words.w[1] : words.w[0], high = (index + c) & 1 ? words.w[3] : words.w[2];
            u8 mark = ((index + c) & 2 ? high : low) >= dropping.threshold;
            mask[row * s + c] = mark;
            dropped[row * s + c] = from_acc<T>(mark ? to_acc(p) * keep : A(0));
        }
    }
}

// From the gradient of what v was multiplied with to scale times that of the scores, in place; a warp a row.
template <class T>
DEVICE void softmax_backward(acc_t<T>* gradients, const T* probabilities, const u8* mask, i64 rows, i64 s, acc_t<T> scale, acc_t<T> keep) {
    typedef acc_t<T> A;
    i64 stride = i64(gridDim.x) * (blockDim.x >> 5);
    int lane = threadIdx.x & 31;
    for (i64 row = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); row < rows; row += stride) {
        i64 at = row * s;
        auto gradient = [&](int c) { return mask ? (mask[at + c] ? gradients[at + c] * keep : A(0)) : gradients[at + c]; };
        A sum = 0;
        for (int c = lane; c < s; c += 32) sum += gradient(c) * to_acc(probabilities[at + c]);
        sum = warp_sum(sum);
        for (int c = lane; c < s; c += 32) gradients[at + c] = scale * to_acc(probabilities[at + c]) * (gradient(c) - sum);
    }
}

// ---- entries: element type; where a matrix may be of the accumulator type too, its name comes first
#define MATRIX_PRODUCTS(M, MATRIX, T, TYPE)                                                                                      \
    KERNEL __launch_bounds__(256) void matrix_by_rows_##MATRIX##_##TYPE(const M* matrix, const T* y, T* rows, i64 b, i64 s,      \
                                                                        i64 heads, i64 group, i64 width) {                       \
        matrix_by_rows(matrix, y, rows, b, s, heads, group, width);                                                              \
    }                                                                                                                            \
    EXPORT(matrix_by_rows_##MATRIX##_##TYPE)                                                                                     \
    KERNEL __launch_bounds__(256) void turned_by_rows_##MATRIX##_##TYPE(const M* matrix, const T* x, T* rows, i64 b, i64 s,      \
                                                                        i64 heads, i64 group, i64 width) {                       \
        turned_by_rows(matrix, x, rows, b, s, heads, group, width);                                                              \
    }                                                                                                                            \
    EXPORT(turned_by_rows_##MATRIX##_##TYPE)

#define FOR_TYPE(T, TYPE)                                                                                                        \
    KERNEL __launch_bounds__(256) void rows_by_rows_##TYPE(const T* x, const T* y, acc_t<T>* matrix, i64 b, i64 s, i64 heads,    \
                                                           i64 group, i64 width) {                                               \
        rows_by_rows(x, y, matrix, b, s, heads, group, width);                                                                   \
    }                                                                                                                            \
    EXPORT(rows_by_rows_##TYPE)                                                                                                  \
    KERNEL __launch_bounds__(256, 2) void materialised_softmax_##TYPE(                                                           \
        const acc_t<T>* scores, const int* runs, T* probabilities, u8* mask, T* dropped, i64 rows, i64 s, i64 heads,             \
        acc_t<T> scale, acc_t<T> keep, u64 first_token, u64 first_head, u64 all_heads, u64 purpose, u64 seed, u32 threshold) {   \
        Dropping dropping = {first_token, first_head, all_heads, purpose, seed, threshold};                                      \
        softmax(scores, runs, probabilities, mask, dropped, rows, s, heads, scale, keep, dropping);                              \
    }                                                                                                                            \
    EXPORT(materialised_softmax_##TYPE)                                                                                          \
    KERNEL __launch_bounds__(256) void materialised_softmax_backward_##TYPE(                                                     \
        acc_t<T>* gradients, const T* probabilities, const u8* mask, i64 rows, i64 s, acc_t<T> scale, acc_t<T> keep) {           \
        softmax_backward(gradients, probabilities, mask, rows, s, scale, keep);                                                  \
    }                                                                                                                            \
    EXPORT(materialised_softmax_backward_##TYPE)

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
FOR_TYPE(bf16, bf16)
MATRIX_PRODUCTS(float, f32, float, f32)
MATRIX_PRODUCTS(double, f64, double, f64)
MATRIX_PRODUCTS(bf16, bf16, bf16, bf16)
MATRIX_PRODUCTS(float, f32, bf16, bf16)
