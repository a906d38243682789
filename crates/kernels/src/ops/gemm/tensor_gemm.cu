// Matrix products of bf16 on tensor cores, plain or over groups of rows whose sizes are read on the device: no host ever
// waits for them. c [m, n] = [c +] a b, c bf16 or f32, sums in f32, rounded once. An element's sum has one order, that of
// the inner dim in steps of 16, whatever the tile, the alignment and the groups around it.
//
// A block of 4 warps makes 128 x 128 of c, 64 x 64 a warp (or 64 x 128, 32 x 64 a warp, where groups are small), and goes
// on to the next tile until there are none. Slices of 32 of the inner dim come by cp.async, four of them at a time in
// 64 KiB (48 KiB) of shared memory, so that two blocks fit on a multiprocessor of sm_80 and newer. Rows are stored in
// 16-byte pieces whose place is exchanged by row, so neither the copies nor ldmatrix (with .trans for operands that are
// contiguous along rows of c) meet equal banks. Warps without rows or columns of c do not compute.
//
// Work: 2 m n k operations. Bytes moved: a is read n / 128 times and b m / 128 times, mostly from the second-level cache;
// (m k + k n + m n) elements once from memory. Floor: the larger of operations over the tensor cores' peak and those
// bytes over the bandwidth. Per slice of 16, a warp of 64 x 64 reads 4 KiB of shared memory for 32 mma. Not measured.

constexpr int DEPTH = 32, STAGES = 4, THREADS = 128, WIDTH = 128;

enum Layout { NT, NN, TN };

// Place of a 16-byte piece in a slice of an operand with `SIZE` rows (or columns) of c. INNER: memory is contiguous along
// the inner dim, 4 pieces a row of c; else SIZE / 8 pieces for each of the 32 of the inner dim.
template <bool INNER, int SIZE> DEVICE int place(int row, int piece) {
    return INNER ? row * 4 + (piece ^ ((row >> 1) & 3)) : row * (SIZE / 8) + (piece ^ (row & 7));
}

// Starts to copy a slice; `outer` are rows or columns of c. What is outside is zero.
template <bool INNER, int SIZE>
DEVICE void load_slice(bf16* to, const bf16* from, i64 stride, i64 outer, i64 outer_end, i64 k, i64 k_end, bool aligned) {
#pragma unroll
    for (int i = 0; i < SIZE * 4 / THREADS; i++) {
        int at = int(threadIdx.x) + i * THREADS;
        int row = INNER ? at >> 2 : at / (SIZE / 8), piece = INNER ? at & 3 : at % (SIZE / 8);
        i64 line = (INNER ? outer : k) + row, along = (INNER ? k : outer) + piece * 8;
        i64 line_end = INNER ? outer_end : k_end, along_end = INNER ? k_end : outer_end;
        int count = line < line_end ? int(max_of(min_of(along_end - along, i64(8)), i64(0))) : 0;
        const bf16* source = from + line * stride + along;
        bf16* target = to + place<INNER, SIZE>(row, piece) * 8;
        if (aligned) {
            cp_async_16(target, count ? source : from, count * 2);
        } else {
            Pack<bf16> pack;
#pragma unroll
            for (int j = 0; j < 8; j++) pack.v[j].bits = j < count ? source[j].bits : u16(0);
            store_pack(target, pack);
        }
    }
}

// 16 rows of c from `row` on, 16 of the inner dim from `k` on, as the left operand of mma.
template <bool INNER, int SIZE> DEVICE void left_fragment(u32 (&r)[4], const bf16* slice, int row, int k) {
    int lane = int(threadIdx.x) & 31, low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
    if (INNER) ldmatrix_x4(r, slice + place<INNER, SIZE>(row + low + second * 8, k / 8 + third) * 8);
    else ldmatrix_x4_transposed(r, slice + place<INNER, SIZE>(k + low + third * 8, row / 8 + second) * 8);
}
// 16 columns of c: two right operands, each of two registers.
template <bool INNER, int SIZE> DEVICE void right_fragment(u32 (&r)[4], const bf16* slice, int column, int k) {
    int lane = int(threadIdx.x) & 31, low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
    if (INNER) ldmatrix_x4(r, slice + place<INNER, SIZE>(column + low + third * 8, k / 8 + second) * 8);
    else ldmatrix_x4_transposed(r, slice + place<INNER, SIZE>(k + low + second * 8, column / 8 + third) * 8);
}

// Two neighbouring columns.
struct alignas(8) Pair {
    float x, y;
};
DEVICE Pair unpacked(u32 both) { return {bits_to_float(both << 16), bits_to_float(both & 0xffff0000u)}; }
DEVICE Pair load_pair(const float* from) { return *reinterpret_cast<const Pair*>(from); }
DEVICE Pair load_pair(const bf16* from) { return unpacked(*reinterpret_cast<const u32*>(from)); }
DEVICE void store_pair(float* to, Pair pair) { *reinterpret_cast<Pair*>(to) = pair; }
DEVICE void store_pair(bf16* to, Pair pair) { *reinterpret_cast<u32*>(to) = pack_bf16(pair.x, pair.y); }

// The sums of a warp: fragment (i, j) has rows 16 i and columns 8 j on. What is added to is read for a whole row of
// fragments first, so that its loads are under way together.
template <int ROWS, class V>
DEVICE void store_pairs(const float (&sum)[ROWS / 16][8][4], V* c, i64 row, i64 row_end, i64 column, i64 n, bool accumulate) {
    int lane = int(threadIdx.x) & 31;
    bool whole = n % 2 == 0 && reinterpret_cast<u64>(c) % (2 * sizeof(V)) == 0;
    row += lane >> 2;
    column += (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 own_row = row + i * 16 + half * 8;
            if (own_row >= row_end) continue;
            V* out = c + own_row * n + column;
            Pair old[8] = {};
            if (accumulate) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (whole && column + j * 8 < n) old[j] = load_pair(out + j * 8);
                    if (!whole && column + j * 8 < n) old[j].x = to_acc(out[j * 8]);
                    if (!whole && column + j * 8 + 1 < n) old[j].y = to_acc(out[j * 8 + 1]);
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                Pair pair = {sum[i][j][half * 2], sum[i][j][half * 2 + 1]};
                if (accumulate) pair = {old[j].x + pair.x, old[j].y + pair.y};
                if (whole && column + j * 8 < n) store_pair(out + j * 8, pair);
                if (!whole && column + j * 8 < n) out[j * 8] = from_acc<V>(pair.x);
                if (!whole && column + j * 8 + 1 < n) out[j * 8 + 1] = from_acc<V>(pair.y);
            }
        }
}

// The same for bf16 where rows of c are multiples of 8 bytes. A row of a fragment is 4 lanes with 2 columns each, half of
// what memory writes at once; so neighbouring lanes exchange, and each has 4 columns of one of two fragments.
template <int ROWS>
DEVICE void store_quads(const float (&sum)[ROWS / 16][8][4], bf16* c, i64 row, i64 row_end, i64 column, i64 n, bool accumulate) {
    int lane = int(threadIdx.x) & 31;
    bool odd = lane & 1;
    row += lane >> 2;
    column += odd * 8 + (lane & 2) * 2;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 own_row = row + i * 16 + half * 8;
            bf16* out = c + own_row * n + column;
            uint2 old[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (accumulate && own_row < row_end && column + j * 16 < n) old[j] = *reinterpret_cast<const uint2*>(out + j * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // Chosen and not indexed: registers have no addresses.
                Pair first = {sum[i][2 * j][half * 2], sum[i][2 * j][half * 2 + 1]};
                Pair second = {sum[i][2 * j + 1][half * 2], sum[i][2 * j + 1][half * 2 + 1]}, given = odd ? first : second;
                Pair got = {__shfl_xor_sync(WHOLE_WARP, given.x, 1), __shfl_xor_sync(WHOLE_WARP, given.y, 1)};
                Pair low = odd ? got : first, high = odd ? second : got;
                if (own_row >= row_end || column + j * 16 >= n) continue;
                if (accumulate) {
                    Pair x = unpacked(old[j].x), y = unpacked(old[j].y);
                    low = {x.x + low.x, x.y + low.y};
                    high = {y.x + high.x, y.y + high.y};
                }
                *reinterpret_cast<uint2*>(out + j * 16) = {pack_bf16(low.x, low.y), pack_bf16(high.x, high.y)};
            }
        }
}

template <int ROWS>
DEVICE void store_sums(const float (&sum)[ROWS / 16][8][4], bf16* c, i64 row, i64 row_end, i64 column, i64 n, bool accumulate) {
    if (n % 4 == 0 && reinterpret_cast<u64>(c) % 8 == 0) store_quads<ROWS>(sum, c, row, row_end, column, n, accumulate);
    else store_pairs<ROWS>(sum, c, row, row_end, column, n, accumulate);
}
template <int ROWS>
DEVICE void store_sums(const float (&sum)[ROWS / 16][8][4], float* c, i64 row, i64 row_end, i64 column, i64 n, bool accumulate) {
    store_pairs<ROWS>(sum, c, row, row_end, column, n, accumulate);
}

// One slice of the inner dim for one warp.
template <int LAYOUT, int ROWS>
DEVICE void multiply_slice(float (&sum)[ROWS / 16][8][4], const bf16* slice_a, const bf16* slice_b, int warp_row, int warp_column) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        u32 left[ROWS / 16][4];
#pragma unroll
        for (int i = 0; i < ROWS / 16; i++) left_fragment<LAYOUT != TN, 2 * ROWS>(left[i], slice_a, warp_row + i * 16, k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 right[4];
            right_fragment<LAYOUT == NT, WIDTH>(right, slice_b, warp_column + j * 16, k);
            u32 first[2] = {right[0], right[1]}, second[2] = {right[2], right[3]};
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) {
                mma_bf16(sum[i][2 * j], left[i], first);
                mma_bf16(sum[i][2 * j + 1], left[i], second);
            }
        }
    }
}

// ROWS: rows of a warp; two of the four warps are below each other.
template <int LAYOUT, int ROWS, class V>
DEVICE void sum_tile(const Tile& tile, const bf16* a, const bf16* b, V* c, i64 m, i64 n, i64 k, bool accumulate, bf16* shared) {
    constexpr bool A_INNER = LAYOUT != TN, B_INNER = LAYOUT == NT;
    constexpr int SLICE_A = 2 * ROWS * DEPTH, SLICE = SLICE_A + WIDTH * DEPTH;
    i64 stride_a = A_INNER ? k : m, stride_b = B_INNER ? k : n;
    bool aligned_a = stride_a % 8 == 0 && is_aligned_16(a), aligned_b = stride_b % 8 == 0 && is_aligned_16(b);
    int warp = int(threadIdx.x) >> 5, warp_row = (warp & 1) * ROWS, warp_column = (warp >> 1) * 64;
    bool busy = tile.row + warp_row < tile.row_end && tile.column + warp_column < n;
    int steps = int(ceil_div(tile.k_end - tile.k, i64(DEPTH)));
    float sum[ROWS / 16][8][4] = {};
    auto load = [&](int step) {
        bf16* slice = shared + step % STAGES * SLICE;
        i64 l = tile.k + i64(step) * DEPTH;
        load_slice<A_INNER, 2 * ROWS>(slice, a, stride_a, tile.row, tile.row_end, l, tile.k_end, aligned_a);
        load_slice<B_INNER, WIDTH>(slice + SLICE_A, b, stride_b, tile.column, n, l, tile.k_end, aligned_b);
    };
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        cp_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        // The slice is there for all warps, and none still reads the one that is overwritten next.
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        cp_async_commit();
        const bf16* slice = shared + step % STAGES * SLICE;
        if (busy) multiply_slice<LAYOUT, ROWS>(sum, slice, slice + SLICE_A, warp_row, warp_column);
    }
    // The next tile starts to copy at once.
    cp_async_wait<0>();
    __syncthreads();
    if (busy) store_sums<ROWS>(sum, c, tile.row + warp_row, tile.row_end, tile.column + warp_column, n, accumulate);
}

template <int LAYOUT, int ROWS, class V>
DEVICE void product(const bf16* a, const bf16* b, V* c, Starts starts, i64 groups, i64 m, i64 n, i64 k, bool accumulate) {
    constexpr int HEIGHT = 2 * ROWS;
    DYNAMIC_SHARED(bf16, shared);
    i64 tiles = LAYOUT == TN ? tiles_of_inner<HEIGHT, WIDTH>(groups, m, n) : tiles_of_rows<HEIGHT, WIDTH>(starts, groups, m, n);
    for (i64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        Tile tile = LAYOUT == TN ? tile_of_inner<HEIGHT, WIDTH>(t, starts, groups, m, n, k) : tile_of_rows<HEIGHT, WIDTH>(t, starts, groups, m, n, k);
        // Nothing to add leaves every bit of c.
        if (accumulate && tile.k >= tile.k_end) continue;
        const bf16* own_b = LAYOUT == TN ? b : b + tile.group * n * k;
        V* own_c = LAYOUT == TN ? c + tile.group * m * n : c;
        sum_tile<LAYOUT, ROWS>(tile, a, own_b, own_c, m, n, k, accumulate, shared);
    }
}

// m, n, k are those of the product; groups are of its rows (nt, nn), or of its inner dim (tn).
#define PRODUCT(LAYOUT, ROWS, V, NAME)                                                                                         \
    KERNEL __launch_bounds__(128, 2) void tensor_##NAME(const bf16* a, const bf16* b, V* c, Starts starts, i64 groups, i64 m, i64 n, \
                                                        i64 k, i64 accumulate) {                                               \
        product<LAYOUT, ROWS>(a, b, c, starts, groups, m, n, k, accumulate != 0);                                              \
    }                                                                                                                          \
    EXPORT(tensor_##NAME)
#define BOTH_HEIGHTS(LAYOUT, V, NAME)   \
    PRODUCT(LAYOUT, 64, V, NAME##_128)  \
    PRODUCT(LAYOUT, 32, V, NAME##_64)
BOTH_HEIGHTS(NT, bf16, nt_bf16)
BOTH_HEIGHTS(NT, float, nt_f32)
BOTH_HEIGHTS(NN, bf16, nn_bf16)
BOTH_HEIGHTS(NN, float, nn_f32)
BOTH_HEIGHTS(TN, float, tn_f32)
