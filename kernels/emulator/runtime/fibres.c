// A fibre per GPU thread: its own stack, and a switch that saves the registers that a function call must preserve.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// The size of a stack, with space for private arrays. Only written pages take memory. The lowest page of each stack is
// not accessible, so that an overflow faults.
#define STACK_BYTES (128 * 1024ul)

// Each lane's stack begins this number of bytes lower in its 128 KiB than the stack of the lane before. Otherwise the
// distance between stacks would be a power of two, so they would share cache sets and evict each other.
#define STAGGER_BYTES 320ul

static char* stacks;
static unsigned prepared;
static context scheduler;

static char* stack_of(unsigned index) { return stacks + STACK_BYTES * index; }

void fibres_prepare(unsigned count) {
  if (!stacks) {
    void* memory = mmap(NULL, STACK_BYTES * MSL_MAX_THREADS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    stacks = memory;
  }
  for (; prepared < count; prepared++) mprotect(stack_of(prepared), (size_t)sysconf(_SC_PAGESIZE), PROT_NONE);
}

int fibres_hold(uintptr_t address) {
  return stacks && address - (uintptr_t)stacks < STACK_BYTES * MSL_MAX_THREADS;
}

int fibres_guard(uintptr_t address) {
  uintptr_t offset = address - (uintptr_t)stacks;
  return fibres_hold(address) && offset % STACK_BYTES < (uintptr_t)sysconf(_SC_PAGESIZE);
}

uintptr_t fibre_stack_top(unsigned index) {
  return ((uintptr_t)stack_of(index + 1) - STAGGER_BYTES * (index % MSL_SIMD_WIDTH)) & ~(uintptr_t)63;
}

#if !defined(MSL_UCONTEXT) && defined(__x86_64__)

__attribute__((naked, noinline)) static void switch_to(void** save __attribute__((unused)),
                                                       void* load __attribute__((unused))) {
  __asm__(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

void fibre_begin(unsigned index, fibre* fibre, void (*main)(void)) {
  uintptr_t top = fibre_stack_top(index);
  void** stack = (void**)top;
  *--stack = NULL;  // at its start, a function expects the stack 8 bytes below a multiple of 16
  *--stack = (void*)main;
  for (int saved = 0; saved < 6; saved++) *--stack = NULL;
  fibre->at.stack = stack;
}

#elif !defined(MSL_UCONTEXT) && defined(__aarch64__)

__attribute__((naked, noinline)) static void switch_to(void** save __attribute__((unused)),
                                                       void* load __attribute__((unused))) {
  __asm__(
      "sub sp, sp, #160\n"
      "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret\n");
}

void fibre_begin(unsigned index, fibre* fibre, void (*main)(void)) {
  uintptr_t top = fibre_stack_top(index);
  void** saved = (void**)(top - 160);
  for (int i = 0; i < 20; i++) saved[i] = NULL;
  saved[11] = (void*)main;  // x30, the target of `ret`
  fibre->at.stack = saved;
}

#endif

#ifndef MSL_UCONTEXT

void fibre_switch(fibre* from, fibre* to) {
  switch_to(from ? &from->at.stack : &scheduler.stack, to ? to->at.stack : scheduler.stack);
}

void fibre_abandon(void) {
  void* nowhere;
  switch_to(&nowhere, scheduler.stack);
}

#else  // any other processor: several times slower, because each switch calls the system for the signal mask

void fibre_begin(unsigned index, fibre* fibre, void (*main)(void)) {
  uintptr_t top = fibre_stack_top(index);
  getcontext(&fibre->at);
  fibre->at.uc_stack.ss_sp = stack_of(index);
  fibre->at.uc_stack.ss_size = top - (uintptr_t)stack_of(index);
  fibre->at.uc_link = NULL;
  makecontext(&fibre->at, main, 0);
}

void fibre_switch(fibre* from, fibre* to) { swapcontext(from ? &from->at : &scheduler, to ? &to->at : &scheduler); }
void fibre_abandon(void) { setcontext(&scheduler); }

#endif
