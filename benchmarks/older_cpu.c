/* Makes this processor pass for an older one, for what asks CPUID which instructions there are.
 *
 *     cc -shared -fPIC -O2 -DAVXVNNI=0 benchmarks/older_cpu.c -o older_cpu.so
 *     LD_PRELOAD=./older_cpu.so python ...
 *
 * Linux can let CPUID fault in a process and the threads it starts. The handler asks the processor,
 * takes AVX-512 and AMX out of the answer and, with AVXVNNI=0, AVX-VNNI too. What runs is still
 * this processor, at its own pace: only ratios between programs under the same mask mean anything.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static int allow_cpuid(int allowed) {
  enum { kSetCpuid = 0x1012 };
  return (int)syscall(SYS_arch_prctl, kSetCpuid, allowed);
}

static void mask(unsigned leaf, unsigned part, unsigned r[4]) {
  if (leaf != 7) return;
  if (part == 0) {
    r[1] &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 28 | 1u << 30 | 1u << 31); /* AVX-512 */
    r[2] &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    r[3] &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 23);
    r[3] &= ~(1u << 22 | 1u << 24 | 1u << 25); /* AMX */
  } else if (part == 1) {
    r[0] &= ~(1u << 5 | 1u << 21); /* bfloat16 of AVX-512, float16 of AMX */
    if (!AVXVNNI) r[0] &= ~(1u << 4);
  }
}

static void answer(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *code = (const unsigned char *)registers[REG_RIP];
  (void)info;
  if (code[0] != 0x0f || code[1] != 0xa2) { /* not CPUID: a true fault */
    signal(number, SIG_DFL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
  unsigned r[4];
  allow_cpuid(1);
  __cpuid_count(leaf, part, r[0], r[1], r[2], r[3]);
  allow_cpuid(0);
  mask(leaf, part, r);
  registers[REG_RAX] = r[0];
  registers[REG_RBX] = r[1];
  registers[REG_RCX] = r[2];
  registers[REG_RDX] = r[3];
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, NULL);
  if (allow_cpuid(0) != 0) {
    static const char text[] = "older_cpu: this processor or kernel cannot let CPUID fault\n";
    if (write(2, text, sizeof text - 1) < 0) abort();
    abort();
  }
}
