// The scheduler of emulator.h and the warp operations that have a body of their own.
#include "emulator.h"

#include <map>
#include <string>

namespace emulator {

// Saves the callee-saved registers and the stack, takes up another stack.
extern "C" void plica_switch_stack(void** save, void* load);
asm(".text\n.globl plica_switch_stack\n.type plica_switch_stack,@function\nplica_switch_stack:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp,(%rdi)\n"
    " mov %rsi,%rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

static thread_local Block block_of_thread;
__attribute__((noinline)) Block& this_block() { return block_of_thread; }

static void set_ready(Block& b, unsigned i, bool value) {
    if (value) b.ready[i >> 6] |= uint64_t(1) << (i & 63);
    else b.ready[i >> 6] &= ~(uint64_t(1) << (i & 63));
}

// The fiber that runs next, or -1.
static int next_ready(Block& b) {
    int words = int(b.ready.size());
    if (b.order == BACKWARD) {
        for (int w = words - 1; w >= 0; w--)
            if (b.ready[w]) return w * 64 + 63 - __builtin_clzll(b.ready[w]);
        return -1;
    }
    int start = 0;
    if (b.order == DRAWN) {
        b.draw = b.draw * 6364136223846793005ull + 1442695040888963407ull;
        unsigned at = unsigned(b.draw >> 33) % b.threads;
        uint64_t rest = b.ready[at >> 6] >> (at & 63);
        if (rest) return int(at) + __builtin_ctzll(rest);
        start = int(at >> 6) + 1;
    }
    for (int k = 0; k < words; k++) {
        int w = (start + k) % words;
        if (b.ready[w]) return w * 64 + __builtin_ctzll(b.ready[w]);
    }
    return -1;
}

// Leaves the current fiber for another one that may run, or for the launcher when there is none.
static void leave() {
    Block& b = this_block();
    Fiber* own = b.current;
    int next = b.error ? -1 : next_ready(b);
    if (next < 0) {
        if (b.alive && !b.error) b.error = "deadlock: threads wait at different barriers, or for lanes that do not come";
        void* dropped;
        plica_switch_stack(&dropped, b.scheduler);
    }
    Fiber* other = &b.fibers[size_t(next)];
    if (other == own) return;
    b.current = other;
    b.switches++;
    plica_switch_stack(&own->stack_pointer, other->stack_pointer);
}

void fail(const char* what) {
    Block& b = this_block();
    if (!b.error) b.error = what;
    leave();
}

static void open_barrier(Block& b) {
    b.at_barrier = 0;
    for (unsigned i = 0; i < b.threads; i++)
        if (b.fibers[i].in_barrier) {
            b.fibers[i].in_barrier = false;
            set_ready(b, i, true);
        }
}

static void finish_meeting(Block& b, Warp& warp, size_t at) {
    Meeting meeting = warp.meetings[at];
    warp.meetings.erase(warp.meetings.begin() + long(at));
    meeting.operation(meeting.lanes, meeting.arrived);
    unsigned first = unsigned(&warp - b.warps.data()) * 32;
    for (unsigned i = 0; i < 32; i++)
        if (meeting.arrived >> i & 1) set_ready(b, first + i, true);
}

void sync_block() {
    Block& b = this_block();
    unsigned own = unsigned(b.current - b.fibers.data());
    b.current->in_barrier = true;
    set_ready(b, own, false);
    if (++b.at_barrier == b.alive) open_barrier(b);
    leave();
}

void meet(unsigned mask, WarpOperation operation, void* data) {
    Block& b = this_block();
    Fiber* own = b.current;
    Warp& warp = *own->warp;
    if (!(mask >> own->lane & 1)) return fail("a lane is not in the mask of its own warp operation");
    size_t at = 0;
    while (at < warp.meetings.size() && warp.meetings[at].mask != mask) at++;
    if (at == warp.meetings.size()) {
        warp.meetings.emplace_back();
        warp.meetings[at].mask = mask;
        warp.meetings[at].operation = operation;
    }
    Meeting& meeting = warp.meetings[at];
    if (meeting.operation != operation) return fail("lanes of one mask meet in different warp operations");
    meeting.arrived |= 1u << own->lane;
    meeting.lanes[own->lane] = data;
    set_ready(b, unsigned(own - b.fibers.data()), false);
    if (meeting.arrived == (mask & warp.alive)) finish_meeting(b, warp, at);
    leave();
}

// Threads that have ended count for no barrier and no mask.
[[noreturn]] static void fiber_main() {
    Block& b = this_block();
    b.entry(b.arguments);
    Fiber* own = b.current;
    Warp& warp = *own->warp;
    set_ready(b, unsigned(own - b.fibers.data()), false);
    b.alive--;
    warp.alive &= ~(1u << own->lane);
    if (b.alive && b.at_barrier == b.alive) open_barrier(b);
    for (size_t i = 0; i < warp.meetings.size();) {
        Meeting& meeting = warp.meetings[i];
        if (meeting.arrived && meeting.arrived == (meeting.mask & warp.alive)) finish_meeting(b, warp, i);
        else i++;
    }
    leave();
    __builtin_unreachable();
}

static void prepare(Block& b, size_t shared_bytes) {
    b.threads = b.size.x * b.size.y * b.size.z;
    b.alive = b.threads;
    b.at_barrier = 0;
    b.error = nullptr;
    b.generation++;
    b.stacks.reserve(b.threads);
    if (b.dynamic_shared.size() < shared_bytes + 128) b.dynamic_shared.resize(shared_bytes + 128);
    memset(b.dynamic_shared.data(), 0xFF, shared_bytes + 128);
    b.fibers.resize(b.threads);
    b.warps.assign((b.threads + 31) / 32, Warp());
    b.ready.assign((b.threads + 63) / 64, 0);
    for (unsigned i = 0; i < b.threads; i++) {
        Fiber& f = b.fibers[i];
        f.index = dim3(i % b.size.x, i / b.size.x % b.size.y, i / b.size.x / b.size.y);
        f.lane = i & 31;
        f.warp = &b.warps[i / 32];
        f.warp->alive |= 1u << f.lane;
        f.in_barrier = false;
        f.copy_groups.clear();
        f.open_copies.clear();
        set_ready(b, i, true);
        // What the first switch pops: six registers, then the address to go to; the stack as after a call.
        void** sp = reinterpret_cast<void**>(b.stacks.base + (i + 1) * Stacks::BYTES - 64);
        *--sp = nullptr;
        *--sp = reinterpret_cast<void*>(fiber_main);
        for (int k = 0; k < 6; k++) *--sp = nullptr;
        f.stack_pointer = sp;
    }
}

static const char* run_block(Block& b, size_t shared_bytes) {
    prepare(b, shared_bytes);
    b.current = &b.fibers[size_t(next_ready(b))];
    plica_switch_stack(&b.scheduler, b.current->stack_pointer);
    return b.error;
}

void* dynamic_shared() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(this_block().dynamic_shared.data()) + 127) & ~uintptr_t(127));
}

// ---- tensor cores
static float widen(unsigned pair, unsigned half) {
    unsigned bits = (pair >> (16 * half)) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void multiply(void* const lanes[32], unsigned mask) {
    if (mask != ~0u) return fail("a tensor-core product needs all lanes of its warp");
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const Product* p = static_cast<const Product*>(lanes[lane]);
        unsigned row = lane >> 2, pair = (lane & 3) * 2;
        for (unsigned half = 0; half < 2; half++) {
            a[row][pair + half] = widen(p->a[0], half);
            a[row + 8][pair + half] = widen(p->a[1], half);
            a[row][pair + 8 + half] = widen(p->a[2], half);
            a[row + 8][pair + 8 + half] = widen(p->a[3], half);
            b[pair + half][row] = widen(p->b[0], half);
            b[pair + 8 + half][row] = widen(p->b[1], half);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        float* d = static_cast<const Product*>(lanes[lane])->d;
        unsigned row = lane >> 2, column = (lane & 3) * 2;
        for (unsigned i = 0; i < 4; i++) {
            float sum = 0;
            for (unsigned k = 0; k < 16; k++) sum += a[row + (i >> 1) * 8][k] * b[k][column + (i & 1)];
            d[i] += sum;
        }
    }
}

static uint16_t element(void* const lanes[32], unsigned matrix, unsigned row, unsigned column) {
    uint16_t value;
    memcpy(&value, static_cast<const char*>(static_cast<const MatrixLoad*>(lanes[matrix * 8 + row])->row) + column * 2, 2);
    return value;
}

static void load(void* const lanes[32], unsigned mask, bool transposed) {
    if (mask != ~0u) return fail("a matrix load needs all lanes of its warp");
    for (unsigned lane = 0; lane < 32; lane++)
        if (reinterpret_cast<uintptr_t>(static_cast<const MatrixLoad*>(lanes[lane])->row) & 15) return fail("a row of a matrix load is not aligned to 16 bytes");
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            unsigned outer = lane >> 2, pair = (lane & 3) * 2;
            unsigned low = transposed ? element(lanes, matrix, pair, outer) : element(lanes, matrix, outer, pair);
            unsigned high = transposed ? element(lanes, matrix, pair + 1, outer) : element(lanes, matrix, outer, pair + 1);
            static_cast<const MatrixLoad*>(lanes[lane])->registers[matrix] = low | (high << 16);
        }
}
void load_matrices(void* const lanes[32], unsigned mask) { load(lanes, mask, false); }
void load_matrices_transposed(void* const lanes[32], unsigned mask) { load(lanes, mask, true); }

// ---- asynchronous copies
void copy_later(void* to, const void* from, int bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15) return fail("an asynchronous copy is not aligned to 16 bytes");
    memset(to, 0xFF, 16);
    this_block().current->open_copies.push_back({to, from, bytes});
}
void commit_copies() {
    Fiber* own = this_block().current;
    own->copy_groups.push_back(std::move(own->open_copies));
    own->open_copies.clear();
}
void wait_for_copies(unsigned may_be_open) {
    auto& groups = this_block().current->copy_groups;
    while (groups.size() > may_be_open) {
        for (const Copy& copy : groups.front()) {
            memset(copy.to, 0, 16);
            memcpy(copy.to, copy.from, size_t(copy.bytes));
        }
        groups.erase(groups.begin());
    }
}

// ---- entries by name
struct Entry {
    void (*call)(void**);
    int arity;
};
static std::map<std::string, Entry>& entries() {
    static std::map<std::string, Entry> all;
    return all;
}
Register::Register(const char* name, void (*call)(void**), int arity) { entries()[name] = {call, arity}; }

}  // namespace emulator

typedef void (*EmulatorEntry)(void**);

// The entry of that name, or null.
extern "C" EmulatorEntry plica_emulator_find(const char* name) {
    auto& all = emulator::entries();
    auto found = all.find(name);
    return found == all.end() ? nullptr : found->second.call;
}

// How many parameters the kernel of that name has.
extern "C" int plica_emulator_arity(const char* name) {
    auto found = emulator::entries().find(name);
    return found == emulator::entries().end() ? -1 : found->second.arity;
}

// Runs every block of a launch; null, or what went wrong in the first block that failed.
extern "C" const char* plica_emulator_launch(EmulatorEntry entry, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
                                             void** arguments, int order, uint64_t seed) {
    emulator::Block& b = emulator::this_block();
    b.grid = dim3(grid[0], grid[1], grid[2]);
    b.size = dim3(block[0], block[1], block[2]);
    b.order = emulator::Order(order);
    b.draw = seed;
    b.entry = entry;
    b.arguments = arguments;
    uint64_t total = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t step = 0; step < total; step++) {
        uint64_t i = order == emulator::BACKWARD ? total - 1 - step : step;
        b.index = dim3(unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1]));
        if (const char* error = emulator::run_block(b, shared_bytes)) return error;
    }
    return nullptr;
}
