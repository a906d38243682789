// Rotary position embedding of heads x [t, h, d]: pair (a, b) of a head becomes (a cos - b sin, b cos + a sin), with
// `direction` -1 for the backward. A token belongs to a group of threads, each of which takes packs of all its heads, and
// may do so in place. Bytes moved: 2 s an element of s bytes; the token's row of the table (acc) is read once from memory
// and by the other heads from the cache. The floor is these bytes over the memory's bandwidth. A position that the table
// was not made for gives NaN.

// Row of a position among the table's rising ones, -1 where it is none of them; consecutive ones are found at once.
DEVICE i64 row_of(int position, const int* known, i64 count) {
    if (count == 0) return -1;
    i64 guess = i64(position) - known[0];
    if (guess >= 0 && guess < count && known[guess] == position) return guess;
    i64 low = 0, high = count;
    while (low < high) {
        i64 middle = (low + high) >> 1;
        if (known[middle] < position) low = middle + 1;
        else high = middle;
    }
    return low < count && known[low] == position ? low : -1;
}

// N values of the table from pair `first` on, NaN without a table; with WIDE in packs where they fill some.
template <class A, int N, bool WIDE> DEVICE void load_values(const A* table, int first, int pairs, A (&values)[N]) {
    A nan = infinity<A>() - infinity<A>();
    if (WIDE && N * sizeof(A) % 16 == 0 && table) {
        for (int i = 0; i < N; i += Pack<A>::COUNT) {
            Pack<A> pack = load_pack(table + first + i);
            for (int j = 0; j < Pack<A>::COUNT && i + j < N; j++) values[i + j] = pack.v[j];
        }
        return;
    }
    for (int i = 0; i < N; i++) values[i] = table && first + i < pairs ? table[first + i] : nan;
}

// Pairs i and i + d/2: COUNT of them from `first` on.
template <class T, bool PACKED>
DEVICE void turn_half(const T* x, T* y, const acc_t<T>* cos_sin, int first, int d, acc_t<T> direction) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    int pairs = d / 2;
    A cos[COUNT], sin[COUNT];
    load_values<A, COUNT, PACKED>(cos_sin, first, pairs, cos);
    load_values<A, COUNT, PACKED>(cos_sin ? cos_sin + pairs : cos_sin, first, pairs, sin);
    Pack<T> front = load_part<T, PACKED>(x, first, pairs), back = load_part<T, PACKED>(x + pairs, first, pairs);
    for (int i = 0; i < COUNT; i++) {
        A a = to_acc(front.v[i]), b = to_acc(back.v[i]), s = direction * sin[i];
        front.v[i] = from_acc<T>(a * cos[i] - b * s);
        back.v[i] = from_acc<T>(b * cos[i] + a * s);
    }
    store_part<T, PACKED>(y, first, pairs, front);
    store_part<T, PACKED>(y + pairs, first, pairs, back);
}

// Pairs 2i and 2i + 1: the COUNT elements from `start` on.
template <class T, bool PACKED>
DEVICE void turn_interleaved(const T* x, T* y, const acc_t<T>* cos_sin, int start, int d, acc_t<T> direction) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT / 2;
    int pairs = d / 2;
    A cos[COUNT], sin[COUNT];
    load_values<A, COUNT, PACKED>(cos_sin, start / 2, pairs, cos);
    load_values<A, COUNT, PACKED>(cos_sin ? cos_sin + pairs : cos_sin, start / 2, pairs, sin);
    Pack<T> pack = load_part<T, PACKED>(x, start, d);
    for (int i = 0; i < COUNT; i++) {
        A a = to_acc(pack.v[2 * i]), b = to_acc(pack.v[2 * i + 1]), s = direction * sin[i];
        pack.v[2 * i] = from_acc<T>(a * cos[i] - b * s);
        pack.v[2 * i + 1] = from_acc<T>(b * cos[i] + a * s);
    }
    store_part<T, PACKED>(y, start, d, pack);
}

struct Table {
    const int *positions, *known;
    i64 count;
};

template <class T, bool INTERLEAVED, bool PACKED>
DEVICE void turn(const T* x, T* y, const Table& table, const acc_t<T>* cos_sin, i64 tokens, int heads, int d,
                 acc_t<T> direction, int lanes) {
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    int parts = ((INTERLEAVED ? d : d / 2) + COUNT - 1) / COUNT;
    for (i64 token = i64(blockIdx.x) * group.count + group.index; token < tokens; token += i64(gridDim.x) * group.count) {
        i64 row = row_of(table.positions[token], table.known, table.count);
        const acc_t<T>* values = row < 0 ? nullptr : cos_sin + row * d;
        for (int item = group.lane; item < heads * parts; item += lanes) {
            int head = item / parts, first = (item - head * parts) * COUNT;
            i64 start = (token * heads + head) * d;
            if (INTERLEAVED) turn_interleaved<T, PACKED>(x + start, y + start, values, first, d, direction);
            else turn_half<T, PACKED>(x + start, y + start, values, first, d, direction);
        }
    }
}

#define ROPE(NAME, INTERLEAVED, T, TYPE)                                                                              \
    KERNEL __launch_bounds__(512, 1) void NAME##_##TYPE(const T* x, T* y, const int* positions, const int* known,     \
                                                        i64 count, const acc_t<T>* cos_sin, i64 tokens, i64 heads,    \
                                                        i64 d, acc_t<T> direction, int lanes) {                       \
        Table table = {positions, known, count};                                                                      \
        if ((INTERLEAVED ? d : d / 2) % Pack<T>::COUNT == 0 && is_aligned_16(x) && is_aligned_16(y))                  \
            turn<T, INTERLEAVED, true>(x, y, table, cos_sin, tokens, int(heads), int(d), direction, lanes);           \
        else                                                                                                          \
            turn<T, INTERLEAVED, false>(x, y, table, cos_sin, tokens, int(heads), int(d), direction, lanes);          \
    }                                                                                                                 \
    EXPORT(NAME##_##TYPE)
ROPE(rope_half, false, float, f32)
ROPE(rope_half, false, double, f64)
ROPE(rope_half, false, bf16, bf16)
ROPE(rope_interleaved, true, float, f32)
ROPE(rope_interleaved, true, double, f64)
ROPE(rope_interleaved, true, bf16, bf16)
