/* Counts the bytes that a process has from malloc, and their peak; loaded by LD_PRELOAD. See peaks.py. */

#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long used, peak;

static void *counted(void *block) {
    if (block) {
        long size = malloc_usable_size(block), after = atomic_fetch_add(&used, size) + size;
        long highest = atomic_load(&peak);
        while (after > highest && !atomic_compare_exchange_weak(&peak, &highest, after)) {
        }
    }
    return block;
}

static void forget(void *block) {
    if (block) atomic_fetch_sub(&used, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }

void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *made = memalign(alignment, size);
    if (!made) return ENOMEM;
    *block = made;
    return 0;
}

void *realloc(void *block, size_t size) {
    size_t before = block ? malloc_usable_size(block) : 0;
    void *made = __libc_realloc(block, size);
    if (made || !size) atomic_fetch_sub(&used, (long)before);
    return counted(made);
}

void free(void *block) {
    forget(block);
    __libc_free(block);
}

/* Starts a new peak, and returns the bytes in use. */
long heap_reset(void) {
    long now = atomic_load(&used);
    atomic_store(&peak, now);
    return now;
}

long heap_peak(void) { return atomic_load(&peak); }
