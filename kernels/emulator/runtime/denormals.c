// Flush float32 values below 2^-126 to 0, as GPUs do.
#include "runtime.h"

#if defined(__x86_64__)
unsigned long denormals_flush(void) {
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  return before;
}
void denormals_restore(unsigned long before) { __builtin_ia32_ldmxcsr((unsigned)before); }
#elif defined(__aarch64__)
unsigned long denormals_flush(void) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1ul << 24));
  return before;
}
void denormals_restore(unsigned long before) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)before)); }
#else
unsigned long denormals_flush(void) { return 0; }
void denormals_restore(unsigned long before) { (void)before; }
#endif
