// Turn signals (faults) of a kernel into reports, and pass all other signals to the previous handlers.
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#define _XOPEN_SOURCE 700
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGINT, SIGVTALRM};
#define COUNT (sizeof SIGNALS / sizeof *SIGNALS)

static struct sigaction before[COUNT];
static stack_t stack_before;
static pthread_t dispatcher;

// The watchdog: a timer checks periodically how much CPU time the running threadgroup has taken.
#define LOOKS 8  // checks per `patience`
static struct itimerval timer_before;
static double most_seconds, began;
static unsigned long timed_group;

// ---- the state of the processor at the fault ----

#if defined(__linux__) && defined(__x86_64__)
#define CODE(c) (c)->uc_mcontext.gregs[REG_RIP]
#define STACK(c) (c)->uc_mcontext.gregs[REG_RSP]
#define IS_WRITE(c) ((c)->uc_mcontext.gregs[REG_ERR] >> 1 & 1)
#elif defined(__linux__) && defined(__aarch64__)
#define CODE(c) (c)->uc_mcontext.pc
#define STACK(c) (c)->uc_mcontext.sp
#define IS_WRITE(c) is_write(c)
#elif defined(__APPLE__) && defined(__x86_64__)
#define CODE(c) (c)->uc_mcontext->__ss.__rip
#define STACK(c) (c)->uc_mcontext->__ss.__rsp
#define IS_WRITE(c) ((c)->uc_mcontext->__es.__err >> 1 & 1)
#elif defined(__APPLE__) && defined(__aarch64__)
#define CODE(c) (c)->uc_mcontext->__ss.__pc
#define STACK(c) (c)->uc_mcontext->__ss.__sp
#define IS_WRITE(c) ((c)->uc_mcontext->__es.__esr >> 6 & 1)
#endif

#if defined(__linux__) && defined(__aarch64__)
// Whether the instruction that faulted writes. The instruction is decoded, because some versions of QEMU do not save
// the fault's syndrome. Bit 22 is set for loads, except loads of one general register with sign extension to 64 bits.
static int is_write(const ucontext_t* c) {
  uint32_t code = *(const uint32_t*)c->uc_mcontext.pc;
  int extends_sign = (code & 0x3E800000) == 0x38800000;
  return !(code >> 22 & 1) && !extends_sign;
}
#endif

// The bytes that a call pushes before a function begins: on x86, the return address.
#ifdef __x86_64__
#define PUSHED 8
#else
#define PUSHED 0
#endif

// The handler returns into `fibre_abandon`, on a valid stack, so that the system knows that the handler has ended.
static void leave(ucontext_t* where) {
#ifdef CODE
  CODE(where) = (__typeof__(CODE(where)))(uintptr_t)fibre_abandon;
  STACK(where) = (__typeof__(STACK(where)))(fibre_stack_top(running_index()) - PUSHED);
#else
  (void)where;
  fibre_abandon();
#endif
}

// ---- handling ----

static void pass_on(int number, siginfo_t* info, void* where, const struct sigaction* handler) {
  if (handler->sa_flags & SA_SIGINFO) handler->sa_sigaction(number, info, where);
  else if (handler->sa_handler == SIG_DFL) sigaction(number, handler, NULL);  // the fault then occurs again
  else if (handler->sa_handler != SIG_IGN) handler->sa_handler(number);
}

static const struct sigaction* previous(int number) {
  for (unsigned i = 0; i < COUNT; i++)
    if (SIGNALS[i] == number) return &before[i];
  abort();
}

static int kind_of(int number) {
  switch (number) {
    case SIGFPE: return MSL_ARITHMETIC;
    case SIGILL: return MSL_IMPOSSIBLE;
    case SIGINT: return MSL_INTERRUPTED;
    case SIGVTALRM: return MSL_SPINNING;
    default: return MSL_FAULT;
  }
}

// Whether the running threadgroup has exceeded its time limit.
static int out_of_time(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  double now = (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
  if (timed_group != counted.threadgroups) began = now;
  timed_group = counted.threadgroups;
  return now - began > most_seconds * (LOOKS - 1) / LOOKS;
}

static void report_running(int kind, uintptr_t address, uintptr_t code) {
  fibre* at = running;
  memset(&failure, 0, sizeof failure);
  failure.kind = kind;
  failure.address = address;
  failure.code = code;
  failure.site = (msl_site){kind == MSL_SPINNING ? at->what : NULL, at->file, at->line, 0};
  for (int i = 0; i < 3; i++) {
    failure.group[i] = at->thread.group->position[i];
    failure.thread[i] = at->thread.position[i];
  }
  failure.lane = at->thread.index % MSL_SIMD_WIDTH;
  failure.count = (unsigned)fibres_guard(address);
}

static void handle(int number, siginfo_t* info, void* context) {
  ucontext_t* where = context;
  int in_kernel = running && pthread_equal(pthread_self(), dispatcher);
  if (number == SIGVTALRM) {
    if (running && !in_kernel) pthread_kill(dispatcher, number);
    if (!in_kernel || !out_of_time()) return;
  } else if (number == SIGINT) {
    pass_on(number, info, where, previous(number));
    interrupted = 1;
    if (!in_kernel) return;
  } else if (!in_kernel) {
    pass_on(number, info, where, previous(number));
    return;
  }
  uintptr_t code = 0;
#ifdef CODE
  code = (uintptr_t)CODE(where);
#endif
  report_running(kind_of(number), (uintptr_t)(number == SIGVTALRM ? NULL : info->si_addr), code);
#ifdef IS_WRITE
  failure.is_known = code != failure.address;  // a jump to an invalid address is neither a read nor a write
  if (failure.is_known) failure.is_write = IS_WRITE(where);
#endif
  if (!findings_add(&failure) || number == SIGINT || number == SIGVTALRM) end_grid();
  end_thread();
  leave(where);
}

// ---- installed during a dispatch ----

void signals_install(unsigned patience) {
  static char* stack;
  if (!stack) stack = malloc(1 << 17);
  stack_t mine = {.ss_sp = stack, .ss_size = 1 << 17};
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
  dispatcher = pthread_self();
  sigaltstack(&mine, &stack_before);
  for (unsigned i = 0; i < COUNT; i++) {
    sigaction(SIGNALS[i], &action, &before[i]);
    int is_default = before[i].sa_handler == SIG_DFL || before[i].sa_handler == SIG_IGN;
    if (SIGNALS[i] == SIGINT && is_default) sigaction(SIGINT, &before[i], NULL);
  }
  timed_group = 0;
  most_seconds = 1e-3 * patience;
  long tick = (long)patience * 1000 / LOOKS + 1;
  struct itimerval timer = {{tick / 1000000, tick % 1000000}, {tick / 1000000, tick % 1000000}};
  setitimer(ITIMER_VIRTUAL, &timer, &timer_before);
}

void signals_restore(void) {
  setitimer(ITIMER_VIRTUAL, &timer_before, NULL);
  // If there was no handler of the timer's signal before, keep ours: without a handler, a late signal would end the
  // process.
  for (unsigned i = 0; i < COUNT; i++)
    if (SIGNALS[i] != SIGVTALRM || before[i].sa_handler != SIG_DFL) sigaction(SIGNALS[i], &before[i], NULL);
  sigaltstack(&stack_before, NULL);
}

// Convert addresses of instructions to offsets in their shared object, as in the object's debug information.
void signals_locate(msl_report* report) {
  Dl_info found;
  if (!report->code || !dladdr((void*)report->code, &found)) return;
  report->object = found.dli_fname;
  report->code -= (uintptr_t)found.dli_fbase;
  if (report->other_code) report->other_code -= (uintptr_t)found.dli_fbase;
}
