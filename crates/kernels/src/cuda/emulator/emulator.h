// CUDA kernels on the CPU. A launch runs block by block; the threads of a block are fibers of one thread of the
// operating system that change only where they meet: at barriers and warp operations. The schedule decides which of
// those that may run goes first: forwards, backwards or drawn, and blocks go in the same order. A missing barrier
// then shows as a wrong result under some schedule; meeting places that not all reach are reported, never waited for.
//
// Shared memory is filled with 0xFF before a block's first use of it, an asynchronous copy fills its target with 0xFF
// until it is waited for, so what is read too early is NaN. Warp operations are carried out by the lane that arrives
// last, for all. Not modelled: caches, the memory model between blocks, limits of registers and shared memory,
// instructions of one architecture only (wgmma, TMA, tcgen05), the last bits of approximate functions. x86-64.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

namespace emulator {

enum Order { FORWARD = 0, BACKWARD = 1, DRAWN = 2 };

typedef void (*WarpOperation)(void* const lanes[32], unsigned mask);

// Lanes that wait for the rest of their mask.
struct Meeting {
    unsigned mask = 0, arrived = 0;
    WarpOperation operation = nullptr;
    void* lanes[32];
};

struct Warp {
    unsigned alive = 0;
    std::vector<Meeting> meetings;
};

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    void* stack_pointer = nullptr;
    dim3 index;
    unsigned lane = 0;
    Warp* warp = nullptr;
    bool in_barrier = false;
    std::vector<std::vector<Copy>> copy_groups;
    std::vector<Copy> open_copies;
};

struct Stacks {
    unsigned char* base = nullptr;
    size_t count = 0;
    // An odd number of cache lines: stacks must not share cache sets.
    static constexpr size_t BYTES = (96 << 10) + 17 * 64;
    void reserve(size_t wanted) {
        if (count >= wanted) return;
        release();
        void* memory = mmap(nullptr, wanted * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) { perror("emulator: stacks of fibers"); abort(); }
        base = static_cast<unsigned char*>(memory);
        count = wanted;
    }
    void release() {
        if (base) munmap(base, count * BYTES);
        base = nullptr;
        count = 0;
    }
    ~Stacks() { release(); }
};

struct Block {
    dim3 grid, size, index;
    unsigned threads = 0, alive = 0, at_barrier = 0;
    Order order = FORWARD;
    uint64_t draw = 0;
    uint64_t generation = 0;  // one a block ever run on this thread: tells fresh shared memory
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<uint64_t> ready;  // bit set of the fibers that may run
    Stacks stacks;
    std::vector<unsigned char> dynamic_shared;
    Fiber* current = nullptr;
    void* scheduler = nullptr;
    void (*entry)(void**) = nullptr;
    void** arguments = nullptr;
    const char* error = nullptr;
    uint64_t switches = 0;
};

Block& this_block();
void meet(unsigned mask, WarpOperation operation, void* own);
void sync_block();
void fail(const char* what);

// Static shared memory of a kernel: poisoned before the first use in every block.
template <class T> inline T* fresh(T* memory, size_t bytes, uint64_t& seen) {
    if (seen != this_block().generation) {
        seen = this_block().generation;
        memset(static_cast<void*>(memory), 0xFF, bytes);
    }
    return memory;
}

template <class T> struct Exchange {
    T value;
    unsigned source;
    T result;
};
template <class T> void exchange(void* const lanes[32], unsigned mask) {
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) {
            Exchange<T>* own = static_cast<Exchange<T>*>(lanes[i]);
            // A lane outside of the mask has nothing to give: the own value, as hardware may.
            unsigned from = mask >> (own->source & 31) & 1 ? own->source & 31 : i;
            own->result = static_cast<Exchange<T>*>(lanes[from])->value;
        }
}
template <class T> inline T exchanged(unsigned mask, T value, unsigned source) {
    Exchange<T> own{value, source, value};
    meet(mask, exchange<T>, &own);
    return own.result;
}

struct Vote {
    int value;
    unsigned result;
};
inline void vote(void* const lanes[32], unsigned mask) {
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1 && static_cast<Vote*>(lanes[i])->value) ballot |= 1u << i;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) static_cast<Vote*>(lanes[i])->result = ballot;
}
inline void nothing(void* const[32], unsigned) {}

struct Product {
    float* d;
    const unsigned* a;
    const unsigned* b;
};
void multiply(void* const lanes[32], unsigned mask);
struct MatrixLoad {
    unsigned* registers;
    const void* row;
};
void load_matrices(void* const lanes[32], unsigned mask);
void load_matrices_transposed(void* const lanes[32], unsigned mask);
void copy_later(void* to, const void* from, int bytes);
void commit_copies();
void wait_for_copies(unsigned may_be_open);
void* dynamic_shared();

// Kernels by name, with a way to call each from an array of pointers to its arguments.
template <class... A, size_t... I> inline void apply(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <class... A> inline void apply_all(void (*kernel)(A...), void** arguments) {
    apply(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> constexpr int arity(void (*)(A...)) { return int(sizeof...(A)); }
struct Register {
    Register(const char* name, void (*call)(void**), int arity);
};

}  // namespace emulator

#define EXPORT(name)                                                             \
    static void call_##name(void** arguments) { emulator::apply_all(name, arguments); } \
    static emulator::Register register_##name(#name, call_##name, emulator::arity(name));
#define SHARED(T, name, n)                                   \
    alignas(16) static thread_local T name##_memory[n];       \
    static thread_local uint64_t name##_seen = 0;             \
    T(&name)[n] = *reinterpret_cast<T(*)[n]>(emulator::fresh(&name##_memory[0], sizeof(name##_memory), name##_seen))
#define DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(emulator::dynamic_shared())

// Compilers for the CPU may split an access of 16 bytes, so that a wrong address would pass here and fault on a GPU.
#define CHECK_ALIGNED_16(pointer) \
    if (reinterpret_cast<uintptr_t>(pointer) & 15) emulator::fail("an access of 16 bytes is not aligned to 16 bytes")

#define threadIdx (emulator::this_block().current->index)
#define blockIdx (emulator::this_block().index)
#define blockDim (emulator::this_block().size)
#define gridDim (emulator::this_block().grid)

inline void __syncthreads() { emulator::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::meet(mask, emulator::nothing, nullptr); }
inline unsigned own_lane() { return emulator::this_block().current->lane; }
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emulator::exchanged(mask, value, (own_lane() & ~unsigned(width - 1)) | (unsigned(source) & unsigned(width - 1)));
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32) {
    return emulator::exchanged(mask, value, own_lane() ^ unsigned(distance));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    unsigned lane = own_lane();
    return emulator::exchanged(mask, value, (lane & unsigned(width - 1)) >= distance ? lane - distance : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    unsigned lane = own_lane();
    return emulator::exchanged(mask, value, (lane & unsigned(width - 1)) + distance < unsigned(width) ? lane + distance : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulator::Vote own{predicate != 0, 0};
    emulator::meet(mask, emulator::vote, &own);
    return own.result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
template <class T> inline T __ldg(const T* pointer) { return *pointer; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
// The empty statement hides where the product comes from, so that the compiler cannot fuse it.
inline float __fmul_rn(float a, float b) {
    float product = a * b;
    asm("" : "+x"(product));
    return product;
}
inline double __dmul_rn(double a, double b) {
    double product = a * b;
    asm("" : "+x"(product));
    return product;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline int atomicExch(int* p, int v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
inline int atomicCAS(int* p, int expected, int v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
inline int atomicMax(int* p, int v) {
    int old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
inline int atomicMin(int* p, int v) {
    int old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old > v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
inline int atomicOr(int* p, int v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }

inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emulator::Product own{d, a, b};
    emulator::meet(~0u, emulator::multiply, &own);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    emulator::MatrixLoad own{r, row};
    emulator::meet(~0u, emulator::load_matrices, &own);
}
inline void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
    emulator::MatrixLoad own{r, row};
    emulator::meet(~0u, emulator::load_matrices_transposed, &own);
}
inline void cp_async_16(void* to_shared, const void* from_global, int bytes = 16) { emulator::copy_later(to_shared, from_global, bytes); }
inline void cp_async_commit() { emulator::commit_copies(); }
template <int N> inline void cp_async_wait() { emulator::wait_for_copies(N); }
