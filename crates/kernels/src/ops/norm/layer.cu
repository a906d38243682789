// LayerNorm over rows of d elements: y = w (x - mean) / sqrt(variance + eps) + b, the variance about the mean. A group of
// threads takes a row; what it reads again comes from the nearest cache.
//   forward      reads x, writes y and two statistics a row: 2 s bytes an element of s bytes
//   backward     reads dy and x, writes dx: 3 s bytes an element. A block keeps the column sums of its rows (dw, then db)
//                in shared memory and writes them once (acc / 8 bytes an element at most); `norm_partials` of norm.cu adds
//                them in the order of the blocks.
// The floor is these bytes over the memory's bandwidth.

template <class T, bool PACKED>
DEVICE void forward(const T* x, const T* w, const T* b, T* y, acc_t<T>* means, acc_t<T>* inverses, i64 rows, int d,
                    acc_t<T> eps, int lanes, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    int step = group.lanes * COUNT, begin = group.lane * COUNT;
    for (i64 first = i64(blockIdx.x) * group.count; first < rows; first += i64(gridDim.x) * group.count) {
        i64 row = first + group.index;
        bool inside = row < rows;
        int end = inside ? d : 0;
        A sum = 0, squares = 0;
#pragma unroll 2
        for (int c = begin; c < end; c += step) {
            Pack<T> a = load_part<T, PACKED>(x + row * d, c, d);
            for (int i = 0; i < COUNT; i++) sum += to_acc(a.v[i]);
        }
        A mean = group_sum(sum, group, scratch) / A(d);
#pragma unroll 2
        for (int c = begin; c < end; c += step) {
            Pack<T> a = load_part<T, PACKED>(x + row * d, c, d);
            for (int i = 0; i < COUNT; i++)
                if (PACKED || c + i < d) squares += (to_acc(a.v[i]) - mean) * (to_acc(a.v[i]) - mean);
        }
        A inverse = A(1) / sqrt_of(group_sum(squares, group, scratch) / A(d) + eps);
        if (inside && group.lane == 0) {
            means[row] = mean;
            inverses[row] = inverse;
        }
#pragma unroll 1
        for (int c = begin; c < end; c += step) {
            Pack<T> a = load_part<T, PACKED>(x + row * d, c, d);
            Pack<T> v = load_part<T, PACKED>(w, c, d), u = load_part<T, PACKED>(b, c, d);
            for (int i = 0; i < COUNT; i++)
                a.v[i] = from_acc<T>(to_acc(v.v[i]) * ((to_acc(a.v[i]) - mean) * inverse) + to_acc(u.v[i]));
            store_part<T, PACKED>(y + row * d, c, d, a);
        }
    }
}

template <class T> struct Backward {
    const T *dy, *x, *w;
    const acc_t<T>*means, *inverses;
    T* dx;
    acc_t<T>* partials;
    i64 rows, partial_rows;
    int d;
};

// dx of a row, and its shares of dw and db added to the group's sums: element i of pack p at i * packs + p, db behind dw.
template <class T, bool PACKED>
DEVICE void backward_row(const Backward<T>& b, i64 row, bool inside, acc_t<T>* sums, const Group& group, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    int d = b.d, packs = (d + COUNT - 1) / COUNT, end = inside ? packs : 0;
    i64 start = row * d;
    A mean = 0, inverse = 0, sum_g = 0, sum_gx = 0;
    if (inside) {
        mean = b.means[row];
        inverse = b.inverses[row];
    }
#pragma unroll 1
    for (int p = group.lane; p < end; p += group.lanes) {
        Pack<T> g = load_part<T, PACKED>(b.dy + start, p * COUNT, d), a = load_part<T, PACKED>(b.x + start, p * COUNT, d);
        Pack<T> w = load_part<T, PACKED>(b.w, p * COUNT, d);
        for (int i = 0; i < COUNT; i++) {
            A upstream = to_acc(g.v[i]), unit = (to_acc(a.v[i]) - mean) * inverse, by_unit = to_acc(w.v[i]) * upstream;
            sums[i * packs + p] += upstream * unit;
            sums[(COUNT + i) * packs + p] += upstream;
            sum_g += by_unit;
            sum_gx += unit * by_unit;
        }
    }
    A mean_g = group_sum(sum_g, group, scratch) / A(d), mean_gx = group_sum(sum_gx, group, scratch) / A(d);
#pragma unroll 1
    for (int p = group.lane; p < end; p += group.lanes) {
        Pack<T> g = load_part<T, PACKED>(b.dy + start, p * COUNT, d), a = load_part<T, PACKED>(b.x + start, p * COUNT, d);
        Pack<T> w = load_part<T, PACKED>(b.w, p * COUNT, d);
        for (int i = 0; i < COUNT; i++) {
            A unit = (to_acc(a.v[i]) - mean) * inverse;
            a.v[i] = from_acc<T>(inverse * (to_acc(w.v[i]) * to_acc(g.v[i]) - mean_g - unit * mean_gx));
        }
        store_part<T, PACKED>(b.dx + start, p * COUNT, d, a);
    }
}

// `scratch`: 32 elements of shared memory; the sums of the groups stand behind it.
template <class T, bool PACKED> DEVICE void backward(const Backward<T>& b, int lanes, acc_t<T>* sums, acc_t<T>* scratch) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    int d = b.d, packs = (d + COUNT - 1) / COUNT, size = 2 * packs * COUNT;
    A* own = sums + group.index * size;
    for (i64 block = blockIdx.x; block * b.partial_rows < b.rows; block += gridDim.x) {
        for (int p = group.lane; p < packs; p += group.lanes)
            for (int i = 0; i < 2 * COUNT; i++) own[i * packs + p] = 0;
        i64 end = min_of(b.rows, (block + 1) * b.partial_rows);
        for (i64 first = block * b.partial_rows; first < end; first += group.count)
            backward_row<T, PACKED>(b, first + group.index, first + group.index < end, own, group, scratch);
        __syncthreads();
        for (int c = threadIdx.x; c < 2 * d; c += blockDim.x) {
            int column = c < d ? c : c - d;
            int place = (column % COUNT + (c < d ? 0 : COUNT)) * packs + column / COUNT;
            A total = 0;
            for (int q = 0; q < group.count; q++) total += sums[q * size + place];
            b.partials[block * 2 * d + c] = total;
        }
        __syncthreads();
    }
}

#define LAYER(T, TYPE)                                                                                                \
    KERNEL __launch_bounds__(512, 1) void layer_forward_##TYPE(const T* x, const T* w, const T* b, T* y,              \
                                                               acc_t<T>* means, acc_t<T>* inverses, i64 rows, i64 d,  \
                                                               acc_t<T> eps, int lanes) {                             \
        SHARED(acc_t<T>, scratch, 32);                                                                                \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(w) && is_aligned_16(b) && is_aligned_16(y))  \
            forward<T, true>(x, w, b, y, means, inverses, rows, d, eps, lanes, scratch);                              \
        else                                                                                                          \
            forward<T, false>(x, w, b, y, means, inverses, rows, d, eps, lanes, scratch);                             \
    }                                                                                                                 \
    EXPORT(layer_forward_##TYPE)                                                                                      \
    KERNEL __launch_bounds__(512, 1) void layer_backward_##TYPE(                                                      \
        const T* dy, const T* x, const T* w, const acc_t<T>* means, const acc_t<T>* inverses, T* dx,                  \
        acc_t<T>* partials, i64 rows, i64 d, i64 partial_rows, int lanes) {                                           \
        DYNAMIC_SHARED(acc_t<T>, sums);                                                                               \
        Backward<T> b = {dy, x, w, means, inverses, dx, partials, rows, partial_rows, int(d)};                        \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(dy) && is_aligned_16(x) && is_aligned_16(w) && is_aligned_16(dx)) \
            backward<T, true>(b, lanes, sums + 32, sums);                                                             \
        else                                                                                                          \
            backward<T, false>(b, lanes, sums + 32, sums);                                                            \
    }                                                                                                                 \
    EXPORT(layer_backward_##TYPE)
LAYER(float, f32)
LAYER(double, f64)
LAYER(bf16, bf16)
