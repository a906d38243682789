/* A driver, a compiler and a library of products for the tests of cuda/driver: one device whose memory is the host's.
   Streams are real queues that run only when somebody waits, so that bytes reused too early, missing waits and memory
   used after it was freed show. The file is opened under the names libcuda, libnvrtc, libcublas and libcublasLt.

   FAKE_LOG    every call worth a look is written there, a line each
   FAKE_FAIL   NAME=CODE: this function returns this code
   FAKE_DEVICES, FAKE_POOLS, FAKE_MEMORY   number of devices, memory pools or not, bytes that can be had */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

static int number(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static void note(const char* format, ...) {
    const char* path = getenv("FAKE_LOG");
    FILE* file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    va_list list;
    va_start(list, format);
    vfprintf(file, format, list);
    va_end(list);
    fputc('\n', file);
    fclose(file);
}
static int fails(const char* name) {
    const char* text = getenv("FAKE_FAIL");
    size_t n = strlen(name);
    return text && !strncmp(text, name, n) && text[n] == '=' ? atoi(text + n + 1) : 0;
}
#define BEGIN                        \
    int code = fails(__func__);      \
    if (code) return code;

/* ---- streams and events */
struct stream;
struct mark { int done; struct stream* stream; };
struct event { struct mark* mark; };
struct command {
    void (*run)(struct command*);
    struct command* next;
    struct mark* mark;
    address to, from;
    size_t bytes;
    int value;
    void* more;
};
struct stream { struct command *first, *last; int priority; };

static void run_stream(struct stream* s) {
    while (s->first) {
        struct command* c = s->first;
        s->first = c->next;
        if (!s->first) s->last = NULL;
        c->run(c);
        free(c);
    }
}
static struct command* queue(struct stream* s, void (*run)(struct command*)) {
    struct command* c = calloc(1, sizeof *c);
    c->run = run;
    if (s->last) s->last->next = c; else s->first = c;
    s->last = c;
    return c;
}
static void run_copy(struct command* c) { memmove((void*)c->to, (void*)c->from, c->bytes); }
static void run_fill(struct command* c) { memset((void*)c->to, c->value, c->bytes); }
static void run_record(struct command* c) { c->mark->done = 1; }
static void run_wait(struct command* c) { if (!c->mark->done) run_stream(c->mark->stream); }

int cuStreamCreateWithPriority(struct stream** s, unsigned flags, int priority) {
    BEGIN
    *s = calloc(1, sizeof **s);
    (*s)->priority = priority;
    note("stream %u %d", flags, priority);
    return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { BEGIN *least = 0; *greatest = -5; return 0; }
int cuStreamDestroy_v2(struct stream* s) { run_stream(s); note("stream gone"); free(s); return 0; }
int cuStreamSynchronize(struct stream* s) { BEGIN run_stream(s); return 0; }
int cuStreamWaitEvent(struct stream* s, struct event* e, unsigned flags) {
    BEGIN
    (void)flags;
    queue(s, run_wait)->mark = e->mark;
    return 0;
}
int cuEventCreate(struct event** e, unsigned flags) { BEGIN *e = calloc(1, sizeof **e); note("event %u", flags); return 0; }
int cuEventDestroy_v2(struct event* e) { note("event gone"); free(e); return 0; }
int cuEventRecord(struct event* e, struct stream* s) {
    BEGIN
    e->mark = calloc(1, sizeof *e->mark); /* kept: waits of before still look at theirs */
    e->mark->stream = s;
    queue(s, run_record)->mark = e->mark;
    return 0;
}
int cuEventSynchronize(struct event* e) { BEGIN if (!e->mark->done) run_stream(e->mark->stream); return 0; }
int cuEventQuery(struct event* e) { BEGIN return e->mark->done ? 0 : 600; }
int cuEventElapsedTime(float* ms, struct event* a, struct event* b) {
    BEGIN
    if (!a->mark->done || !b->mark->done) return 600;
    *ms = 1.5f;
    return 0;
}

/* ---- the device */
int cuInit(unsigned flags) { BEGIN (void)flags; return 0; }
int cuDriverGetVersion(int* v) { *v = 13020; return 0; }
int cuDeviceGetCount(int* n) { BEGIN *n = number("FAKE_DEVICES", 1); return 0; }
int cuDeviceGet(int* d, int i) { BEGIN *d = i; return 0; }
int cuDeviceGetName(char* name, int n, int d) { snprintf(name, n, "fake GPU %d", d); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int d) { (void)d; *bytes = 1 << 30; return 0; }
int cuDeviceGetAttribute(int* v, int which, int d) {
    (void)d;
    switch (which) {
        case 16: *v = 132; break;                            /* multiprocessors */
        case 75: *v = 9; break;                              /* compute capability */
        case 76: *v = 0; break;
        case 97: *v = 232448; break;                         /* shared memory of a block */
        case 115: *v = number("FAKE_POOLS", 1); break;
        default: return 1;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) { BEGIN *c = (void*)(intptr_t)(d + 1); note("context %d", d); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { note("context gone %d", d); return 0; }
int cuCtxSetCurrent(void* c) { BEGIN (void)c; return 0; }
int cuDeviceCanAccessPeer(int* can, int a, int b) { BEGIN *can = a != b; return 0; }
int cuCtxEnablePeerAccess(void* c, unsigned flags) { BEGIN (void)flags; note("reach %d", (int)(intptr_t)c - 1); return 0; }
int cuGetErrorName(int code, const char** s) { *s = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int code, const char** s) { *s = code == 700 ? "an illegal memory access was encountered" : "a fake error"; return 0; }

/* ---- memory: blocks stay where they are, so that late uses read poison and not a crash */
struct block { address at; size_t bytes; int live; struct block* next; };
static struct block* blocks;
static size_t used, reserved;

static int take(address* at, size_t bytes) {
    if (used + bytes > (size_t)number("FAKE_MEMORY", 1 << 30)) return 2;
    struct block* b = calloc(1, sizeof *b);
    b->at = (address)aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset((void*)b->at, 0xFF, bytes);
    b->bytes = bytes;
    b->live = 1;
    b->next = blocks;
    blocks = b;
    used += bytes;
    if (used > reserved) reserved = used;
    *at = b->at;
    return 0;
}
static int give(address at) {
    for (struct block* b = blocks; b; b = b->next)
        if (b->at == at && b->live) {
            b->live = 0;
            used -= b->bytes;
            memset((void*)at, 0xFE, b->bytes);
            return 0;
        }
    note("freed twice");
    return 1;
}
static void run_give(struct command* c) { give(c->to); }

int cuMemPoolCreate(void** pool, const int* properties) {
    BEGIN
    *pool = &blocks;
    /* kind of memory, no handles, a device, its number */
    note("pool %d %d %d %d", properties[0], properties[1], properties[2], properties[3]);
    return 0;
}
int cuMemPoolDestroy(void* pool) { (void)pool; note("pool gone, %zu bytes in use", used); return 0; }
int cuMemPoolSetAttribute(void* pool, int which, uint64_t* v) { (void)pool; note("pool attribute %d %llx", which, (unsigned long long)*v); return 0; }
int cuMemPoolGetAttribute(void* pool, int which, uint64_t* v) {
    (void)pool;
    *v = which == 5 ? reserved : which == 7 ? used : 0;
    return 0;
}
int cuMemPoolTrimTo(void* pool, size_t bytes) { (void)pool; (void)bytes; reserved = used; note("trim"); return 0; }
int cuMemPoolSetAccess(void* pool, const int* access, size_t n) {
    BEGIN
    (void)pool;
    note("access %d %d %d %zu", access[0], access[1], access[2], n);
    return 0;
}
int cuMemAllocFromPoolAsync(address* at, size_t bytes, void* pool, struct stream* s) {
    BEGIN
    (void)pool;
    int full = take(at, bytes);
    if (full) run_stream(s); /* what is freed in the stream's order comes back when it has run */
    return full;
}
int cuMemFreeAsync(address at, struct stream* s) { BEGIN queue(s, run_give)->to = at; return 0; }
int cuMemAlloc_v2(address* at, size_t bytes) { BEGIN note("plain %zu", bytes); return take(at, bytes); }
int cuMemFree_v2(address at) { BEGIN note("plain gone"); return give(at); }
int cuMemHostAlloc(void** at, size_t bytes, unsigned flags) { BEGIN note("pinned %zu %u", bytes, flags); *at = malloc(bytes); return 0; }
int cuMemFreeHost(void* at) { note("pinned gone"); free(at); return 0; }

static int copy(const char* name, address to, address from, size_t bytes, struct stream* s) {
    int code = fails(name);
    if (code) return code;
    struct command* c = queue(s, run_copy);
    c->to = to;
    c->from = from;
    c->bytes = bytes;
    return 0;
}
int cuMemcpyHtoDAsync_v2(address to, address from, size_t bytes, struct stream* s) { return copy(__func__, to, from, bytes, s); }
int cuMemcpyDtoHAsync_v2(address to, address from, size_t bytes, struct stream* s) { return copy(__func__, to, from, bytes, s); }
int cuMemcpyAsync(address to, address from, size_t bytes, struct stream* s) { return copy(__func__, to, from, bytes, s); }
int cuMemsetD8Async(address to, unsigned char value, size_t bytes, struct stream* s) {
    BEGIN
    struct command* c = queue(s, run_fill);
    c->to = to;
    c->value = value;
    c->bytes = bytes;
    return 0;
}

/* ---- the compiler: an image is "FAKE" and the options */
struct program { char *text, *image; };
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 5; return 0; }
int nvrtcGetNumSupportedArchs(int* n) { *n = 3; return 0; }
int nvrtcGetSupportedArchs(int* list) { list[0] = 80; list[1] = 90; list[2] = 100; return 0; }
const char* nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_FAKE"; }
int nvrtcCreateProgram(struct program** p, const char* text, const char* name, int n, const char* const* a, const char* const* b) {
    BEGIN
    (void)n; (void)a; (void)b;
    *p = calloc(1, sizeof **p);
    (*p)->text = strdup(text);
    note("program %s", name);
    return 0;
}
int nvrtcCompileProgram(struct program* p, int n, const char* const* options) {
    BEGIN
    if (strstr(p->text, "#error")) return 6;
    size_t size = 8;
    for (int i = 0; i < n; i++) size += strlen(options[i]) + 1;
    p->image = calloc(1, size);
    strcat(p->image, "FAKE");
    for (int i = 0; i < n; i++) strcat(strcat(p->image, " "), options[i]);
    note("compile%s", p->image + 4);
    return 0;
}
int nvrtcGetProgramLogSize(struct program* p, size_t* n) { *n = p->image ? 1 : 18; return 0; }
int nvrtcGetProgramLog(struct program* p, char* log) { strcpy(log, p->image ? "" : "x.cu(1): error: e"); return 0; }
int nvrtcGetCUBINSize(struct program* p, size_t* n) { *n = p->image ? strlen(p->image) + 1 : 0; return 0; }
int nvrtcGetCUBIN(struct program* p, char* image) { strcpy(image, p->image); return 0; }
int nvrtcGetPTXSize(struct program* p, size_t* n) { return nvrtcGetCUBINSize(p, n); }
int nvrtcGetPTX(struct program* p, char* image) { return nvrtcGetCUBIN(p, image); }
int nvrtcDestroyProgram(struct program** p) { free((*p)->text); free((*p)->image); free(*p); *p = NULL; note("program gone"); return 0; }

/* ---- kernels: add_one(float* x, long n) */
struct function { char name[64]; int shared_max; };
int cuModuleLoadData(void** m, const char* image) {
    BEGIN
    if (strncmp(image, "FAKE", 4)) { note("module refused"); return 200; }
    *m = (void*)&blocks;
    note("module");
    return 0;
}
int cuModuleUnload(void* m) { (void)m; note("module gone"); return 0; }
int cuModuleGetFunction(struct function** f, void* m, const char* name) {
    (void)m;
    if (!strcmp(name, "missing")) return 500;
    *f = calloc(1, sizeof **f);
    snprintf((*f)->name, sizeof (*f)->name, "%s", name);
    (*f)->shared_max = 49152;
    return 0;
}
int cuFuncGetParamInfo(struct function* f, size_t i, size_t* offset, size_t* bytes) { (void)f; *offset = 8 * i; *bytes = 8; return i < 2 ? 0 : 1; }
int cuFuncSetAttribute(struct function* f, int which, int value) { BEGIN note("attribute %d %d", which, value); f->shared_max = value; return 0; }
static void run_add_one(struct command* c) { for (size_t i = 0; i < c->bytes; i++) ((float*)c->to)[i] += 1; }
int cuLaunchKernel(struct function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, struct stream* s, void** arguments, void** extra) {
    BEGIN
    if (extra || by != 1 || bz != 1 || (int)shared > f->shared_max) return 1;
    note("launch %s %u %u %u %u %u", f->name, gx, gy, gz, bx, shared);
    struct command* c = queue(s, run_add_one);
    c->to = *(address*)arguments[0];
    c->bytes = *(int64_t*)arguments[1];
    return 0;
}

/* ---- products, columns first: d = alpha op(a) op(b) + beta d */
struct layout { int type; uint64_t rows, columns; int64_t ld; };
struct product { int scale, op_a, op_b, m, n, k, type_ab, type_c; int64_t lda, ldb, ldc; address a, b, c; double alpha, beta; int is_listed; };

static double get(int type, address at, int64_t i) {
    uint32_t bits;
    float value;
    switch (type) {
        case 0: return ((float*)at)[i];
        case 1: return ((double*)at)[i];
        default: bits = (uint32_t)((uint16_t*)at)[i] << 16; memcpy(&value, &bits, 4); return value;
    }
}
static void put(int type, address at, int64_t i, double x) {
    uint32_t bits;
    float value = (float)x;
    switch (type) {
        case 0: ((float*)at)[i] = value; return;
        case 1: ((double*)at)[i] = x; return;
        default: memcpy(&bits, &value, 4); ((uint16_t*)at)[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}
static void run_product(struct command* command) {
    struct product* p = command->more;
    address a = p->is_listed ? *(address*)p->a : p->a, b = p->is_listed ? *(address*)p->b : p->b;
    address c = p->is_listed ? *(address*)p->c : p->c;
    for (int i = 0; i < p->m; i++)
        for (int j = 0; j < p->n; j++) {
            double sum = 0;
            for (int l = 0; l < p->k; l++)
                sum += get(p->type_ab, a, p->op_a ? l + i * p->lda : i + l * p->lda) *
                       get(p->type_ab, b, p->op_b ? j + l * p->ldb : l + j * p->ldb);
            double old = p->beta == 0 ? 0 : p->beta * get(p->type_c, c, i + j * p->ldc);
            put(p->type_c, c, i + j * p->ldc, p->alpha * sum + old);
        }
    free(p);
}

size_t cublasLtGetVersion(void) { return 130201; }
int cublasLtCreate(void** h) { BEGIN *h = &used; note("products"); return 0; }
int cublasLtDestroy(void* h) { (void)h; note("products gone"); return 0; }
int cublasLtMatmulDescCreate(struct product** d, int compute, int scale) { BEGIN *d = calloc(1, sizeof **d); (*d)->scale = scale; note("description %d %d", compute, scale); return 0; }
int cublasLtMatmulDescDestroy(void* d) { free(d); note("description gone"); return 0; }
int cublasLtMatmulDescSetAttribute(struct product* d, int which, const int* value, size_t bytes) {
    if (bytes != 4) return 7;
    if (which == 3) d->op_a = *value; else if (which == 4) d->op_b = *value; else return 7;
    return 0;
}
int cublasLtMatrixLayoutCreate(struct layout** l, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    BEGIN
    *l = calloc(1, sizeof **l);
    **l = (struct layout){type, rows, columns, ld};
    return 0;
}
int cublasLtMatrixLayoutDestroy(void* l) { free(l); return 0; }
int cublasLtMatmulPreferenceCreate(void** p) { *p = malloc(1); return 0; }
int cublasLtMatmulPreferenceDestroy(void* p) { free(p); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void* p, int which, const void* value, size_t bytes) {
    (void)p;
    note("preference %d %llu", which, bytes == 8 ? *(unsigned long long*)value : *(unsigned*)value);
    return bytes == (which == 1 ? 8 : 4) ? 0 : 7;
}
int cublasLtMatmulAlgoGetHeuristic(void* h, struct product* d, struct layout* a, struct layout* b, struct layout* c, struct layout* r,
                                   void* p, int wanted, char* results, int* count) {
    BEGIN
    (void)h; (void)p; (void)results; (void)r;
    uint64_t m = d->op_a ? a->columns : a->rows, k = d->op_a ? a->rows : a->columns;
    uint64_t k_ = d->op_b ? b->columns : b->rows, n = d->op_b ? b->rows : b->columns;
    *count = m == c->rows && n == c->columns && k == k_ ? wanted : 0;
    note("search %d", *count);
    return 0;
}
int cublasLtMatmul(void* h, struct product* d, const void* alpha, address a, struct layout* la, address b, struct layout* lb, const void* beta,
                   address c, struct layout* lc, address r, struct layout* lr, const void* algo, address space, size_t bytes, struct stream* s) {
    BEGIN
    (void)h; (void)algo; (void)lr;
    if (c != r || !space || bytes != 32 << 20) return 7;
    struct product* p = malloc(sizeof *p);
    *p = *d;
    p->m = lc->rows; p->n = lc->columns; p->k = d->op_a ? la->rows : la->columns;
    p->type_ab = la->type; p->type_c = lc->type;
    p->lda = la->ld; p->ldb = lb->ld; p->ldc = lc->ld;
    p->a = a; p->b = b; p->c = c;
    p->alpha = d->scale == 1 ? *(double*)alpha : *(float*)alpha;
    p->beta = d->scale == 1 ? *(double*)beta : *(float*)beta;
    p->is_listed = 0;
    queue(s, run_product)->more = p;
    return 0;
}
static struct stream* blas_stream;
int cublasCreate_v2(void** h) { BEGIN *h = &reserved; note("groups"); return 0; }
int cublasDestroy_v2(void* h) { (void)h; note("groups gone"); return 0; }
int cublasSetStream_v2(void* h, struct stream* s) { (void)h; blas_stream = s; return 0; }
int cublasGemmGroupedBatchedEx(void* h, const int* op_a, const int* op_b, const int* m, const int* n, const int* k, const void* alpha,
                               address a, int type_a, const int* lda, address b, int type_b, const int* ldb, const void* beta, address c,
                               int type_c, const int* ldc, int count, const int* sizes, int compute) {
    BEGIN
    (void)h;
    if (type_a != type_b || type_a != type_c) return 15;
    note("grouped %d", count);
    for (int i = 0; i < count; i++) {
        if (sizes[i] != 1) return 7;
        struct product* p = calloc(1, sizeof *p);
        int is_double = compute == 70; /* CUBLAS_COMPUTE_64F */
        *p = (struct product){0, op_a[i], op_b[i], m[i], n[i], k[i], type_a, type_c, lda[i], ldb[i], ldc[i], a + 8 * i, b + 8 * i, c + 8 * i,
                              is_double ? ((double*)alpha)[i] : ((float*)alpha)[i], is_double ? ((double*)beta)[i] : ((float*)beta)[i], 1};
        queue(blas_stream, run_product)->more = p;
    }
    return 0;
}
