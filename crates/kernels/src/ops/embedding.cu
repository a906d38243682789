// Rows of a table by id, and the sum of gradients into those rows. Bytes moved, of s bytes an element: forward 2 n d s for
// n tokens; backward n d s for the gradients and 2 acc for every element of a row that occurs. The floor is that over the
// memory's bandwidth.
//
// The backward adds the tokens of a row in their order, without float atomics. Tokens are listed by row first: `count`
// gives each token a slot among those of its row, `place` gives each row a stretch of the list, `fill` enters the tokens.
// Slots and stretches come from integer atomics and differ from run to run; `gather` (one block a row that occurs, that
// of the token in slot 0) puts the tokens of its row in order before it adds them, so that the sums do not.

DEVICE i64 local_row(int id, i64 first_id, i64 rows) {
    i64 row = i64(id) - first_id;
    return id >= 0 && row >= 0 && row < rows ? row : -1;
}

template <class T, bool PACKED>
DEVICE void forward(const T* table, const int* ids, T* x, i64 first_id, i64 rows, i64 tokens, int d, int lanes) {
    constexpr int COUNT = Pack<T>::COUNT;
    Group group = own_group(lanes);
    for (i64 token = i64(blockIdx.x) * group.count + group.index; token < tokens; token += i64(gridDim.x) * group.count) {
        i64 row = local_row(ids[token], first_id, rows);
#pragma unroll 2
        for (int c = group.lane * COUNT; c < d; c += lanes * COUNT) {
            Pack<T> a;
            if (row >= 0) {
                a = load_part<T, PACKED>(table + row * d, c, d);
            } else {
                for (int i = 0; i < COUNT; i++) a.v[i] = from_acc<T>(acc_t<T>(0));
            }
            store_part<T, PACKED>(x + token * d, c, d, a);
        }
    }
}

// counts [rows] start at zero; slots [tokens], -1 for an id that is no row of the table.
KERNEL __launch_bounds__(256) void embedding_count(const int* ids, int* counts, int* slots, i64 first_id, i64 rows,
                                                   i64 tokens) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 token = blockIdx.x * i64(blockDim.x) + threadIdx.x; token < tokens; token += stride) {
        i64 row = local_row(ids[token], first_id, rows);
        slots[token] = row < 0 ? -1 : atomicAdd(counts + row, 1);
    }
}
EXPORT(embedding_count)

// starts [rows] of those that occur; counts[rows] is what is given away so far, zero at first.
KERNEL __launch_bounds__(256) void embedding_place(const int* ids, int* counts, const int* slots, int* starts,
                                                   i64 first_id, i64 rows, i64 tokens) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 token = blockIdx.x * i64(blockDim.x) + threadIdx.x; token < tokens; token += stride) {
        if (slots[token] != 0) continue;
        i64 row = local_row(ids[token], first_id, rows);
        starts[row] = atomicAdd(counts + rows, counts[row]);
    }
}
EXPORT(embedding_place)

KERNEL __launch_bounds__(256) void embedding_fill(const int* ids, const int* slots, const int* starts, int* list,
                                                  i64 first_id, i64 rows, i64 tokens) {
    i64 stride = i64(gridDim.x) * blockDim.x;
    for (i64 token = blockIdx.x * i64(blockDim.x) + threadIdx.x; token < tokens; token += stride) {
        if (slots[token] < 0) continue;
        list[starts[local_row(ids[token], first_id, rows)] + slots[token]] = int(token);
    }
}
EXPORT(embedding_fill)

constexpr int BITS = 32768, WORDS = BITS / 32;  // tokens whose presence is marked at a time
constexpr int STEP = 256;                       // tokens that are looked through at a time: one a thread

// COUNT sums of a row from column c on, in packs (COUNT of them fill some) or one by one.
template <class A, int COUNT, bool PACKED> DEVICE void load_sums(const A* row, int c, int d, A (&sums)[COUNT]) {
    for (int i = 0; i < COUNT; i += Pack<A>::COUNT) {
        Pack<A> pack = load_part<A, PACKED>(row, c + i, d);
        for (int j = 0; j < Pack<A>::COUNT; j++) sums[i + j] = pack.v[j];
    }
}
template <class A, int COUNT, bool PACKED> DEVICE void store_sums(A* row, int c, int d, const A (&sums)[COUNT]) {
    for (int i = 0; i < COUNT; i += Pack<A>::COUNT) {
        Pack<A> pack;
        for (int j = 0; j < Pack<A>::COUNT; j++) pack.v[j] = sums[i + j];
        store_part<A, PACKED>(row, c + i, d, pack);
    }
}

// dtable[row] += the gradients of `count` tokens in the order of `list`, which is in shared memory.
template <class T, bool PACKED>
DEVICE void add_tokens(const T* dx, acc_t<T>* row, const int* list, int count, int d) {
    typedef acc_t<T> A;
    constexpr int COUNT = Pack<T>::COUNT;
    for (int c = threadIdx.x * COUNT; c < d; c += STEP * COUNT) {
        A sums[COUNT];
        load_sums<A, COUNT, PACKED>(row, c, d, sums);
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            Pack<T> g = load_part<T, PACKED>(dx + i64(list[t]) * d, c, d);
            for (int i = 0; i < COUNT; i++) sums[i] += to_acc(g.v[i]);
        }
        store_sums<A, COUNT, PACKED>(row, c, d, sums);
    }
}

// The tokens of a short list, in order: each has as many before it as are smaller.
DEVICE void order_few(const int* list, int count, int* ordered) {
    if (threadIdx.x < count) {
        int own = list[threadIdx.x], place = 0;
        for (int i = 0; i < count; i++) place += list[i] < own;
        ordered[place] = own;
    }
    __syncthreads();
}

// A long list, in order: marks its tokens in a bit set, window by window, and reads them off step by step.
template <class T, bool PACKED>
DEVICE void gather_many(const T* dx, acc_t<T>* row, const int* list, int count, i64 tokens, int d, u32* words,
                        int* ordered) {
    for (i64 window = 0; window < tokens; window += BITS) {
        for (int i = threadIdx.x; i < WORDS; i += STEP) words[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += STEP) {
            i64 bit = list[i] - window;
            if (bit >= 0 && bit < BITS) atomicOr(reinterpret_cast<int*>(words) + (bit >> 5), int(1u << (bit & 31)));
        }
        __syncthreads();
        int ready = 0;
        for (int step = 0; step < BITS && window + step < tokens; step += STEP) {
            int own = (step + int(threadIdx.x)) >> 5, before = ready, more = 0;
            for (int i = step >> 5; i < (step + STEP) >> 5; i++) {
                if (i < own) before += __popc(words[i]);
                more += __popc(words[i]);
            }
            u32 bit = 1u << (threadIdx.x & 31);
            if (words[own] & bit) ordered[before + __popc(words[own] & (bit - 1))] = int(window + step + threadIdx.x);
            ready += more;
            if (ready > STEP) {
                __syncthreads();
                add_tokens<T, PACKED>(dx, row, ordered, ready, d);
                ready = 0;
                __syncthreads();
            }
        }
        __syncthreads();
        add_tokens<T, PACKED>(dx, row, ordered, ready, d);
        __syncthreads();
    }
}

template <class T, bool PACKED>
DEVICE void gather(const T* dx, const int* ids, const int* counts, const int* slots, const int* starts, const int* list,
                   acc_t<T>* dtable, i64 first_id, i64 rows, i64 tokens, int d, u32* words, int* ordered) {
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        if (slots[token] != 0) continue;
        i64 row = local_row(ids[token], first_id, rows);
        const int* own = list + starts[row];
        int count = counts[row];
        if (count <= STEP) {
            order_few(own, count, ordered);
            add_tokens<T, PACKED>(dx, dtable + row * d, ordered, count, d);
            __syncthreads();
        } else {
            gather_many<T, PACKED>(dx, dtable + row * d, own, count, tokens, d, words, ordered);
        }
    }
}

#define EMBEDDING(T, TYPE)                                                                                            \
    KERNEL __launch_bounds__(512, 1) void embedding_forward_##TYPE(const T* table, const int* ids, T* x,              \
                                                                   i64 first_id, i64 rows, i64 tokens, i64 d,         \
                                                                   int lanes) {                                       \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(table) && is_aligned_16(x))                                      \
            forward<T, true>(table, ids, x, first_id, rows, tokens, int(d), lanes);                                   \
        else                                                                                                          \
            forward<T, false>(table, ids, x, first_id, rows, tokens, int(d), lanes);                                  \
    }                                                                                                                 \
    EXPORT(embedding_forward_##TYPE)                                                                                  \
    KERNEL __launch_bounds__(256, 1) void embedding_gather_##TYPE(                                                    \
        const T* dx, const int* ids, const int* counts, const int* slots, const int* starts, const int* list,         \
        acc_t<T>* dtable, i64 first_id, i64 rows, i64 tokens, i64 d) {                                                \
        SHARED(u32, words, WORDS);                                                                                    \
        SHARED(int, ordered, 2 * STEP);                                                                               \
        if (d % Pack<T>::COUNT == 0 && is_aligned_16(dx) && is_aligned_16(dtable))                                    \
            gather<T, true>(dx, ids, counts, slots, starts, list, dtable, first_id, rows, tokens, int(d), words,      \
                            ordered);                                                                                 \
        else                                                                                                          \
            gather<T, false>(dx, ids, counts, slots, starts, list, dtable, first_id, rows, tokens, int(d), words,     \
                             ordered);                                                                                \
    }                                                                                                                 \
    EXPORT(embedding_gather_##TYPE)
EMBEDDING(float, f32)
EMBEDDING(double, f64)
EMBEDDING(bf16, bf16)
