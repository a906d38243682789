// Matrix products of any sizes, element types and alignments on the ordinary arithmetic units, plain or over groups of
// rows whose sizes are read on the device: c [m, n] = [c +] a b with sums in the accumulator type, rounded once. bf16
// with bf16 is in gemm/tensor_gemm.cu.
//
// Work: 2 m n k operations. A block of 256 threads makes 64 x 64 of c, 4 x 4 a thread, from slices of 16 of the inner
// dim, kept twice in 17 KiB (f64: 34 KiB) of shared memory: while one is used, the next one is on its way through
// registers. 16 multiply-adds of a thread need two 16-byte reads of shared memory. Bytes moved: a is read n / 64 times,
// b m / 64 times (mostly from the second-level cache), c written once. Floor: the larger of operations over the peak of
// the f32 (f64) units and (m k + k n + m n) elements over the bandwidth. Not measured.

constexpr int TILE = 64, DEPTH = 16, THREADS = 256;
// Room behind each row of a slice: threads that write one row of an operand meet fewer equal banks.
constexpr int STRIDE = TILE + 4;

enum Layout { NT = 0, NN = 1, TN = 2 };

// This thread's part of a slice, 4 elements. `inner`: consecutive elements of memory are along the inner dim.
template <class T> DEVICE void fetch(acc_t<T> (&part)[4], const T* from, bool inner, i64 stride, i64 outer, i64 outer_end, i64 k, i64 k_end) {
    for (int i = 0; i < 4; i++) {
        int at = int(threadIdx.x) + i * THREADS;
        i64 o = outer + (inner ? at / DEPTH : at % TILE), l = k + (inner ? at % DEPTH : at / TILE);
        part[i] = o < outer_end && l < k_end ? to_acc(from[inner ? o * stride + l : l * stride + o]) : acc_t<T>(0);
    }
}
template <class A> DEVICE void put(A* slice, const A (&part)[4], bool inner) {
    for (int i = 0; i < 4; i++) {
        int at = int(threadIdx.x) + i * THREADS;
        slice[inner ? at % DEPTH * STRIDE + at / DEPTH : at / TILE * STRIDE + at % TILE] = part[i];
    }
}
template <class A> DEVICE void four(A (&values)[4], const A* from) {
    for (int i = 0; i < 4; i += Pack<A>::COUNT) {
        Pack<A> pack = load_pack(from + i);
        for (int j = 0; j < Pack<A>::COUNT; j++) values[i + j] = pack.v[j];
    }
}

template <class T, class U, class V>
DEVICE void sum_tile(const Tile& tile, const T* a, const U* b, V* c, i64 layout, i64 m, i64 n, i64 k, bool accumulate, acc_t<V>* slices) {
    typedef acc_t<V> A;
    constexpr int SLICE = DEPTH * STRIDE;
    bool a_inner = layout != TN, b_inner = layout == NT;
    i64 a_stride = a_inner ? k : m, b_stride = b_inner ? k : n;
    A *slices_a = slices, *slices_b = slices + 2 * SLICE;
    int rows = int(threadIdx.x) / 16 * 4, columns = int(threadIdx.x) % 16 * 4;
    A sum[4][4] = {}, part_a[4], part_b[4];
    i64 steps = ceil_div(tile.k_end - tile.k, i64(DEPTH));
    for (i64 step = 0; step <= steps; step++) {
        if (step < steps) {
            i64 l = tile.k + step * DEPTH;
            fetch(part_a, a, a_inner, a_stride, tile.row, tile.row_end, l, tile.k_end);
            fetch(part_b, b, b_inner, b_stride, tile.column, n, l, tile.k_end);
        }
        if (step > 0) {
            const A *own_a = slices_a + (step - 1) % 2 * SLICE + rows, *own_b = slices_b + (step - 1) % 2 * SLICE + columns;
#pragma unroll
            for (int l = 0; l < DEPTH; l++) {
                A x[4], y[4];
                four(x, own_a + l * STRIDE);
                four(y, own_b + l * STRIDE);
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++) sum[i][j] += x[i] * y[j];
            }
        }
        if (step < steps) {
            put(slices_a + step % 2 * SLICE, part_a, a_inner);
            put(slices_b + step % 2 * SLICE, part_b, b_inner);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        i64 row = tile.row + rows + i, column = tile.column + columns;
        if (row >= tile.row_end) break;
        V* out = c + row * n + column;
        // What is added to is read before anything is written, so that the loads are under way together.
        A old[4] = {};
        for (int j = 0; j < 4; j++)
            if (accumulate && column + j < n) old[j] = to_acc(out[j]);
        for (int j = 0; j < 4; j++)
            if (column + j < n) out[j] = from_acc<V>(accumulate ? old[j] + sum[i][j] : sum[i][j]);
    }
}

template <class T, class U, class V>
DEVICE void product(const T* a, const U* b, V* c, Starts starts, i64 groups, i64 layout, i64 m, i64 n, i64 k, bool accumulate, acc_t<V>* slices) {
    i64 tiles = layout == TN ? tiles_of_inner<TILE, TILE>(groups, m, n) : tiles_of_rows<TILE, TILE>(starts, groups, m, n);
    for (i64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        Tile tile = layout == TN ? tile_of_inner<TILE, TILE>(t, starts, groups, m, n, k) : tile_of_rows<TILE, TILE>(t, starts, groups, m, n, k);
        // Nothing to add leaves every bit of c.
        if (accumulate && tile.k >= tile.k_end) continue;
        const U* own_b = layout == TN ? b : b + tile.group * n * k;
        V* own_c = layout == TN ? c + tile.group * m * n : c;
        sum_tile(tile, a, own_b, own_c, layout, m, n, k, accumulate, slices);
    }
}

// m, n, k are those of the product; groups are of its rows (nt, nn), or of its inner dim (tn).
#define PRODUCT(T, U, V, TYPES)                                                                                            \
    KERNEL __launch_bounds__(256) void product_##TYPES(const T* a, const U* b, V* c, Starts starts, i64 groups, i64 layout, i64 m, \
                                                       i64 n, i64 k, i64 accumulate) {                                      \
        SHARED(acc_t<V>, slices, 4 * DEPTH * STRIDE);                                                                       \
        product(a, b, c, starts, groups, layout, m, n, k, accumulate != 0, slices);                                         \
    }                                                                                                                       \
    EXPORT(product_##TYPES)
PRODUCT(float, float, float, f32_f32_f32)
PRODUCT(float, float, bf16, f32_f32_bf16)
PRODUCT(float, bf16, float, f32_bf16_f32)
PRODUCT(float, bf16, bf16, f32_bf16_bf16)
PRODUCT(bf16, float, float, bf16_f32_f32)
PRODUCT(bf16, float, bf16, bf16_f32_bf16)
PRODUCT(double, double, double, f64_f64_f64)

// Sum over the lower lanes.
DEVICE i64 lanes_before(i64 x) {
    i64 sum = x;
    for (int distance = 1; distance < 32; distance *= 2) {
        i64 left = __shfl_up_sync(WHOLE_WARP, sum, unsigned(distance));
        if (int(threadIdx.x) >= distance) sum += left;
    }
    return sum - x;
}
// What `Starts` holds, from the rows of each group, for tiles of `height` rows. Groups that do not fit in `rows` are cut.
// One warp.
KERNEL __launch_bounds__(32) void group_starts(const int* counts, int* starts, i64 groups, i64 rows, i64 height) {
    i64 row = 0, tile = 0;
    for (i64 first = 0; first < groups + 2; first += 32) {
        i64 group = first + threadIdx.x, count = group < groups ? i64(counts[group]) : 0, before = lanes_before(count);
        i64 start = group > groups ? rows : min_of(row + before, rows), end = group < groups ? min_of(start + count, rows) : rows;
        i64 tiles = ceil_div(end - start, height), tiles_before = lanes_before(tiles);
        if (group < groups + 2) {
            starts[group] = int(start);
            starts[groups + 2 + group] = int(tile + tiles_before);
        }
        row += __shfl_sync(WHOLE_WARP, before + count, 31);
        tile += __shfl_sync(WHOLE_WARP, tiles_before + tiles, 31);
    }
}
EXPORT(group_starts)
