// RMSNorm over rows of d elements, whole and in the halves between which ranks add their row sums (norm/sharded.rs). A
// group of threads takes a row; what it reads again comes from the nearest cache.
//   forward      reads x (and the residual), writes y (and the sum) and one statistic a row: 2 s or 4 s bytes an element
//   backward     reads dy, x (and the sum's gradient), writes dx: 3 s or 4 s bytes an element (s bytes each). Weight
//                gradients take two passes: a block keeps the column sums of its rows in shared memory and writes them
//                once (acc / 16 bytes an element at most), then `norm_partials` adds them in the order of the blocks.
//   row sums     read their operands once.
// The floor is these bytes over the memory's bandwidth.

template <class T, bool PACKED> DEVICE acc_t<T> squares_of_lane(const T* x, int d, const Group& group) {
    acc_t<T> sum = 0;
#pragma unroll 2
    for (int c = group.lane * Pack<T>::COUNT; c < d; c += group.lanes * Pack<T>::COUNT) {
        Pack<T> a = load_part<T, PACKED>(x, c, d);
        for (int i = 0; i < Pack<T>::COUNT; i++) sum = fma_of(to_acc(a.v[i]), to_acc(a.v[i]), sum);
    }
    return sum;
}

// sum = x + residual, rounded, of the lane's elements; the sum of its squares.
template <class T, bool PACKED>
DEVICE acc_t<T> add_and_squares_of_lane(const T* x, const T* residual, T* sum, int d, const Group& group) {
    acc_t<T> squares = 0;
#pragma unroll 2
    for (int c = group.lane * Pack<T>::COUNT; c < d; c += group.lanes * Pack<T>::COUNT) {
        Pack<T> a = load_part<T, PACKED>(x, c, d), b = load_part<T, PACKED>(residual, c, d);
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            a.v[i] = from_acc<T>(to_acc(a.v[i]) + to_acc(b.v[i]));
            squares = fma_of(to_acc(a.v[i]), to_acc(a.v[i]), squares);
        }
        store_part<T, PACKED>(sum, c, d, a);
    }
    return squares;
}

template <class T, bool PACKED>
DEVICE acc_t<T> dots_of_lane(const T* dy, const T* x, const T* w, int d, const Group& group) {
    acc_t<T> sum = 0;
#pragma unroll 1
    for (int c = group.lane * Pack<T>::COUNT; c < d; c += group.lanes * Pack<T>::COUNT) {
        Pack<T> g = load_part<T, PACKED>(dy, c, d), a = load_part<T, PACKED>(x, c, d), v = load_part<T, PACKED>(w, c, d);
        for (int i = 0; i < Pack<T>::COUNT; i++) sum = fma_of(to_acc(v.v[i]), to_acc(g.v[i]) * to_acc(a.v[i]), sum);
    }
    return sum;
}

// y = w x inverse.
template <class T, bool PACKED>
DEVICE void scale_row(const T* x, const T* w, T* y, int d, acc_t<T> inverse, const Group& group) {
#pragma unroll 2
    for (int c = group.lane * Pack<T>::COUNT; c < d; c += group.lanes * Pack<T>::COUNT) {
        Pack<T> a = load_part<T, PACKED>(x, c, d), v = load_part<T, PACKED>(w, c, d);
        for (int i = 0; i < Pack<T>::COUNT; i++) a.v[i] = from_acc<T>(to_acc(v.v[i]) * (to_acc(a.v[i]) * inverse));
        store_part<T, PACKED>(y, c, d, a);
    }
}

template <class A> DEVICE A inverse_of(A squares, i64 width, A eps) { return A(1) / sqrt_of(squares / A(width) + eps); }

template <class T, bool PACKED>
DEVICE void forward(const T* x, const T* residual, const T* w, T* sum, T* y, acc_t<T>* inverses, i64 rows, int d,
                    acc_t<T> eps, int lanes, acc_t<T>* scratch) {
    Group group = own_group(lanes);
    for (i64 first = i64(blockIdx.x) * group.count; first < rows; first += i64(gridDim.x) * group.count) {
        i64 row = first + group.index;
        bool inside = row < rows;
        const T* from = x + row * d;
        acc_t<T> squares = 0;
        if (inside && residual) {
            squares = add_and_squares_of_lane<T, PACKED>(from, residual + row * d, sum + row * d, d, group);
            from = sum + row * d;
        } else if (inside) {
            squares = squares_of_lane<T, PACKED>(from, d, group);
        }
        squares = group_sum(squares, group, scratch);
        if (!inside) continue;
        acc_t<T> inverse = inverse_of(squares, d, eps);
        if (group.lane == 0) inverses[row] = inverse;
        scale_row<T, PACKED>(from, w, y + row * d, d, inverse, group);
    }
}

// What a backward pass reads and writes; `dsum` is null where the sum has no gradient of its own, `dots` where the row
// sums have yet to be made.
template <class T> struct Backward {
    const T *dy, *x, *w, *dsum;
    const acc_t<T>*inverses, *dots;
    T* dx;
    acc_t<T>* partials;
    i64 rows, partial_rows, width;
    int d;
};

// dx of a row, and its share of the weights' gradient added to the group's sums: element i of pack p at i * packs + p,
// so that neighbouring threads use neighbouring words.
template <class T, bool PACKED>
DEVICE void backward_row(const Backward<T>& b, i64 row, acc_t<T> dot, acc_t<T>* sums, const Group& group) {
    typedef acc_t<T> A;
    int d = b.d, packs = (d + Pack<T>::COUNT - 1) / Pack<T>::COUNT;
    i64 start = row * d;
    A inverse = b.inverses[row];
    A pull = dot * inverse * inverse / A(b.width);
#pragma unroll 1
    for (int p = group.lane; p < packs; p += group.lanes) {
        int c = p * Pack<T>::COUNT;
        Pack<T> g = load_part<T, PACKED>(b.dy + start, c, d), a = load_part<T, PACKED>(b.x + start, c, d);
        Pack<T> w = load_part<T, PACKED>(b.w, c, d);
        A values[Pack<T>::COUNT];
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            A x = to_acc(a.v[i]), dy = to_acc(g.v[i]);
            sums[i * packs + p] = fma_of(dy * x, inverse, sums[i * packs + p]);
            values[i] = inverse * fma_of(to_acc(w.v[i]), dy, -(x * pull));
        }
        if (b.dsum) {
            g = load_part<T, PACKED>(b.dsum + start, c, d);
            for (int i = 0; i < Pack<T>::COUNT; i++) values[i] = to_acc(g.v[i]) + values[i];
        }
        for (int i = 0; i < Pack<T>::COUNT; i++) a.v[i] = from_acc<T>(values[i]);
        store_part<T, PACKED>(b.dx + start, c, d, a);
    }
}

// `scratch`: 32 elements of shared memory; the sums of the groups stand behind it.
template <class T, bool PACKED> DEVICE void backward(const Backward<T>& b, int lanes, acc_t<T>* sums, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    Group group = own_group(lanes);
    int d = b.d, packs = (d + Pack<T>::COUNT - 1) / Pack<T>::COUNT, size = packs * Pack<T>::COUNT;
    A* own = sums + group.index * size;
    for (i64 block = blockIdx.x; block * b.partial_rows < b.rows; block += gridDim.x) {
        for (int p = group.lane; p < packs; p += group.lanes)
            for (int i = 0; i < Pack<T>::COUNT; i++) own[i * packs + p] = 0;
        i64 end = min_of(b.rows, (block + 1) * b.partial_rows);
        for (i64 first = block * b.partial_rows; first < end; first += group.count) {
            i64 row = first + group.index;
            bool inside = row < end;
            A dot = 0;
            if (b.dots) {
                if (inside) dot = b.dots[row];
            } else {
                if (inside) dot = dots_of_lane<T, PACKED>(b.dy + row * d, b.x + row * d, b.w, d, group);
                dot = group_sum(dot, group, scratch);
            }
            if (inside) backward_row<T, PACKED>(b, row, dot, own, group);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            int place = c % Pack<T>::COUNT * packs + c / Pack<T>::COUNT;
            A total = 0;
            for (int q = 0; q < group.count; q++) total += sums[q * size + place];
            b.partials[block * d + c] = total;
        }
        __syncthreads();
    }
}

#define RMS(T, TYPE)                                                                                                  \
    KERNEL __launch_bounds__(512, 1) void rms_forward_##TYPE(const T* x, const T* residual, const T* w, T* sum, T* y,    \
                                                          acc_t<T>* inverses, i64 rows, i64 d, acc_t<T> eps,          \
                                                          int lanes) {                                                \
        SHARED(acc_t<T>, scratch, 32);                                                                                \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(residual) && is_aligned_16(w) &&             \
            is_aligned_16(sum) && is_aligned_16(y))                                                                   \
            forward<T, true>(x, residual, w, sum, y, inverses, rows, d, eps, lanes, scratch);                         \
        else                                                                                                          \
            forward<T, false>(x, residual, w, sum, y, inverses, rows, d, eps, lanes, scratch);                        \
    }                                                                                                                 \
    EXPORT(rms_forward_##TYPE)                                                                                        \
    KERNEL __launch_bounds__(512, 1) void rms_backward_##TYPE(                                                           \
        const T* dy, const T* x, const T* w, const T* dsum, const acc_t<T>* inverses, const acc_t<T>* dots, T* dx,    \
        acc_t<T>* partials, i64 rows, i64 d, i64 width, i64 partial_rows, int lanes) {                                \
        DYNAMIC_SHARED(acc_t<T>, sums);                                                                               \
        Backward<T> b = {dy, x, w, dsum, inverses, dots, dx, partials, rows, partial_rows, width, int(d)};                 \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(dy) && is_aligned_16(x) && is_aligned_16(w) &&                   \
            is_aligned_16(dsum) && is_aligned_16(dx))                                                                 \
            backward<T, true>(b, lanes, sums + 32, sums);                                                             \
        else                                                                                                          \
            backward<T, false>(b, lanes, sums + 32, sums);                                                            \
    }                                                                                                                 \
    EXPORT(rms_backward_##TYPE)
RMS(float, f32)
RMS(double, f64)
RMS(bf16, bf16)

// sums[c] += the partials of column c, blocks of rows in order; partials [blocks, stride] from column `offset` on. 32
// columns a block, eight threads a column.
template <class A>
DEVICE void add_partials(const A* partials, i64 stride, i64 offset, A* sums, i64 blocks, i64 width, A* scratch) {
    int column = threadIdx.x & 31, lane = threadIdx.x >> 5;
    for (i64 tile = blockIdx.x; tile * 32 < width; tile += gridDim.x) {
        i64 c = tile * 32 + column;
        A sum = 0;
        if (c < width) {
#pragma unroll 4
            for (i64 block = lane; block < blocks; block += 8) sum += partials[block * stride + offset + c];
        }
        scratch[lane * 32 + column] = sum;
        __syncthreads();
        if (lane == 0 && c < width) {
            A total = sums[c];
            for (int i = 0; i < 8; i++) total += scratch[i * 32 + column];
            sums[c] = total;
        }
        __syncthreads();
    }
}
#define PARTIALS(A, TYPE)                                                                                             \
    KERNEL __launch_bounds__(256) void norm_partials_##TYPE(const A* partials, i64 stride, i64 offset, A* sums,       \
                                                            i64 blocks, i64 width) {                                  \
        SHARED(A, scratch, 256);                                                                                      \
        add_partials(partials, stride, offset, sums, blocks, width, scratch);                                         \
    }                                                                                                                 \
    EXPORT(norm_partials_##TYPE)
PARTIALS(float, f32)
PARTIALS(double, f64)

// ---- the halves between which ranks add their row sums
template <class T, bool PACKED>
DEVICE void row_sums(const T* dy, const T* x, const T* w, acc_t<T>* sums, i64 rows, int d, int lanes, acc_t<T>* scratch) {
    Group group = own_group(lanes);
    for (i64 first = i64(blockIdx.x) * group.count; first < rows; first += i64(gridDim.x) * group.count) {
        i64 row = first + group.index;
        acc_t<T> sum = 0;
        if (row < rows && dy) sum = dots_of_lane<T, PACKED>(dy + row * d, x + row * d, w, d, group);
        else if (row < rows) sum = squares_of_lane<T, PACKED>(x + row * d, d, group);
        sum = group_sum(sum, group, scratch);
        if (row < rows && group.lane == 0) sums[row] = sum;
    }
}
template <class T, bool PACKED>
DEVICE void apply(const T* x, const T* w, const acc_t<T>* inverses, T* y, i64 rows, int d, int lanes) {
    Group group = own_group(lanes);
    for (i64 row = i64(blockIdx.x) * group.count + group.index; row < rows; row += i64(gridDim.x) * group.count)
        scale_row<T, PACKED>(x + row * d, w, y + row * d, d, inverses[row], group);
}
template <class A> DEVICE void inverses_of(const A* sums, A* inverses, i64 rows, i64 width, A eps) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 row = blockIdx.x * i64(blockDim.x) + threadIdx.x; row < rows; row += stride)
        inverses[row] = inverse_of(sums[row], width, eps);
}

// norm_row_sums: sum w dy x of every row, or its sum of squares where dy (and w) are null.
#define HALVES(T, TYPE)                                                                                               \
    KERNEL __launch_bounds__(512, 1) void norm_row_sums_##TYPE(const T* dy, const T* x, const T* w, acc_t<T>* sums,      \
                                                            i64 rows, i64 d, int lanes) {                             \
        SHARED(acc_t<T>, scratch, 32);                                                                                \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(dy) && is_aligned_16(x) && is_aligned_16(w))                     \
            row_sums<T, true>(dy, x, w, sums, rows, d, lanes, scratch);                                               \
        else                                                                                                          \
            row_sums<T, false>(dy, x, w, sums, rows, d, lanes, scratch);                                              \
    }                                                                                                                 \
    EXPORT(norm_row_sums_##TYPE)                                                                                      \
    KERNEL __launch_bounds__(512, 1) void rms_apply_##TYPE(const T* x, const T* w, const acc_t<T>* inverses, T* y,       \
                                                        i64 rows, i64 d, int lanes) {                                 \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(w) && is_aligned_16(y))                      \
            apply<T, true>(x, w, inverses, y, rows, d, lanes);                                                        \
        else                                                                                                          \
            apply<T, false>(x, w, inverses, y, rows, d, lanes);                                                       \
    }                                                                                                                 \
    EXPORT(rms_apply_##TYPE)
HALVES(float, f32)
HALVES(double, f64)
HALVES(bf16, bf16)

#define INVERSES(A, TYPE)                                                                                             \
    KERNEL __launch_bounds__(256) void inverse_rms_##TYPE(const A* sums, A* inverses, i64 rows, i64 width, A eps) {   \
        inverses_of(sums, inverses, rows, width, eps);                                                                \
    }                                                                                                                 \
    EXPORT(inverse_rms_##TYPE)
INVERSES(float, f32)
INVERSES(double, f64)
