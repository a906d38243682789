// Token rows to their experts and back. Rows are copied as words of 16 bytes where all addresses and the row's length
// allow, else of 8, 4, 2 or 1; sums load 16 bytes at a time where they can, add in the accumulator in the listed order
// and round once. Bytes moved (row of b bytes): gather n (2 b + 4), sum n (b + 4) + t (b + 8), where n rows are listed
// and t are written; weights the same with b = 4 or 8. The floor is that over the memory's bandwidth.
//
// 2^lanes_log2 threads share a row, so that short rows fill warps and long ones spread over a block.

constexpr u32 EMPTY_ROW = 0xffffffffu;
// Words that a thread has under way at a time.
constexpr int UNDER_WAY = 4;

// y[i] = x[index[i]], zeros where the index is empty.
template <class W> DEVICE void gather(const W* x, const u32* index, W* y, i64 rows, i64 words, i64 lanes_log2) {
    i64 lanes = i64(1) << lanes_log2;
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, lane = thread & (lanes - 1);
    i64 stride = (i64(gridDim.x) * blockDim.x) >> lanes_log2;
    for (i64 row = thread >> lanes_log2; row < rows; row += stride) {
        u32 source = index[row];
        const W* from = x + i64(source == EMPTY_ROW ? 0 : source) * words;
        W* to = y + row * words;
        for (i64 i = lane; i < words; i += UNDER_WAY * lanes) {
            W held[UNDER_WAY];
#pragma unroll
            for (int j = 0; j < UNDER_WAY; j++) {
                held[j] = W();
                if (source != EMPTY_ROW && i + j * lanes < words) held[j] = from[i + j * lanes];
            }
#pragma unroll
            for (int j = 0; j < UNDER_WAY; j++)
                if (i + j * lanes < words) to[i + j * lanes] = held[j];
        }
    }
}

#define GATHER(W, BYTES)                                                                                             \
    KERNEL __launch_bounds__(256) void permute_gather_##BYTES(const W* x, const u32* index, W* y, i64 rows, i64 words, \
                                                              i64 lanes_log2) {                                      \
        gather(x, index, y, rows, words, lanes_log2);                                                                \
    }                                                                                                                \
    EXPORT(permute_gather_##BYTES)
GATHER(u8, 1)
GATHER(u16, 2)
GATHER(u32, 4)
GATHER(u64, 8)
GATHER(uint4, 16)

// to[index[i]] = from[i], nothing where the index is empty; no place is named twice.
template <class W> DEVICE void scatter(const W* from, const u32* index, W* to, i64 n) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += stride)
        if (index[i] != EMPTY_ROW) to[index[i]] = from[i];
}
#define SCATTER(W, BYTES)                                                                                        \
    KERNEL __launch_bounds__(256) void permute_scatter_##BYTES(const W* from, const u32* index, W* to, i64 n) { \
        scatter(from, index, to, n);                                                                            \
    }                                                                                                           \
    EXPORT(permute_scatter_##BYTES)
SCATTER(u8, 1)
SCATTER(u16, 2)
SCATTER(u32, 4)
SCATTER(u64, 8)

// Where the listed rows are: by number in one tensor, or each at an address of its own (rows of several devices).
template <class T> struct Numbered {
    const T* first;
    const u32* rows;
    i64 row_len;
    DEVICE_MEMBER const T* at(i64 entry) const { return first + i64(rows[entry]) * row_len; }
};
template <class T> struct Placed {
    const u64* addresses;
    DEVICE_MEMBER const T* at(i64 entry) const { return reinterpret_cast<const T*>(addresses[entry]); }
};

// COUNT elements at once: a pack of 16 bytes, or one.
template <class T, int COUNT> struct Unit {
    T v[COUNT];
};
template <class T, int COUNT> DEVICE Unit<T, COUNT> load_unit(const T* from) {
    Unit<T, COUNT> unit;
    if constexpr (COUNT == 1) {
        unit.v[0] = *from;
    } else {
        Pack<T> pack = load_pack(from);
        memcpy(&unit, &pack, 16);
    }
    return unit;
}
template <class T, int COUNT> DEVICE void store_unit(T* to, const Unit<T, COUNT>& unit) {
    if constexpr (COUNT == 1) {
        *to = unit.v[0];
    } else {
        Pack<T> pack;
        memcpy(&pack, &unit, 16);
        store_pack(to, pack);
    }
}

template <class T, int COUNT, class Rows>
DEVICE void sum_lists(Rows rows, const i64* offsets, T* out, i64 targets, i64 row_len, i64 lanes_log2) {
    i64 lanes = i64(1) << lanes_log2;
    i64 thread = blockIdx.x * i64(blockDim.x) + threadIdx.x, lane = thread & (lanes - 1);
    i64 stride = (i64(gridDim.x) * blockDim.x) >> lanes_log2;
    for (i64 target = thread >> lanes_log2; target < targets; target += stride) {
        i64 begin = offsets[target], end = offsets[target + 1];
        for (i64 i = lane * COUNT; i < row_len; i += lanes * COUNT) {
            Unit<T, COUNT> unit;
            if (begin == end) {
                for (int j = 0; j < COUNT; j++) unit.v[j] = from_acc<T>(acc_t<T>(0));
            } else {
                unit = load_unit<T, COUNT>(rows.at(begin) + i);
            }
            // A single row is copied as it is.
            if (end - begin > 1) {
                acc_t<T> sums[COUNT];
                for (int j = 0; j < COUNT; j++) sums[j] = to_acc(unit.v[j]);
#pragma unroll 4
                for (i64 entry = begin + 1; entry < end; entry++) {
                    Unit<T, COUNT> other = load_unit<T, COUNT>(rows.at(entry) + i);
                    for (int j = 0; j < COUNT; j++) sums[j] += to_acc(other.v[j]);
                }
                for (int j = 0; j < COUNT; j++) unit.v[j] = from_acc<T>(sums[j]);
            }
            store_unit(out + target * row_len + i, unit);
        }
    }
}

// out[t] = sum of the rows listed for t. WIDE: all rows begin at multiples of 16 bytes and are as long.
#define SUM(T, TYPE, WIDTH, COUNT)                                                                                      \
    KERNEL __launch_bounds__(256) void permute_sum_##WIDTH##_##TYPE(const T* first, const u32* rows, const i64* offsets, \
                                                                    T* out, i64 targets, i64 row_len, i64 lanes_log2) { \
        Numbered<T> source = {first, rows, row_len};                                                                    \
        sum_lists<T, COUNT>(source, offsets, out, targets, row_len, lanes_log2);                                        \
    }                                                                                                                   \
    EXPORT(permute_sum_##WIDTH##_##TYPE)                                                                                \
    KERNEL __launch_bounds__(256) void permute_sum_placed_##WIDTH##_##TYPE(const u64* addresses, const i64* offsets,     \
                                                                           T* out, i64 targets, i64 row_len,            \
                                                                           i64 lanes_log2) {                            \
        Placed<T> source = {addresses};                                                                                 \
        sum_lists<T, COUNT>(source, offsets, out, targets, row_len, lanes_log2);                                        \
    }                                                                                                                   \
    EXPORT(permute_sum_placed_##WIDTH##_##TYPE)
SUM(float, f32, wide, 4)
SUM(float, f32, narrow, 1)
SUM(double, f64, wide, 2)
SUM(double, f64, narrow, 1)
SUM(bf16, bf16, wide, 8)
SUM(bf16, bf16, narrow, 1)
