#include "fibre.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDA_HOST_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read_range(const void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
// Kernels neither allocate nor compare memory; the engine does, in whichever fibre is at hand.
const char* __tsan_default_suppressions() { return "race_top:operator new\nrace_top:operator delete\nrace_top:memcmp\n"; }
}
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace cuda_host {

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t GUARD_BYTES = 4096;

thread_local Fibre* switched_from = nullptr;
thread_local Fibre* switched_to = nullptr;

// Runs on the new stack after every switch.
void arrived() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(switched_to->fake_stack, &switched_from->bottom, &switched_from->bottom_bytes);
#endif
}

void start() {
  arrived();
  switched_to->entry(switched_to->argument);
  abort();
}

}  // namespace

#ifdef __x86_64__
// Saves the registers that a call preserves, swaps stacks, restores them.
extern "C" void cuda_host_swap_stacks(void** from, void* to);
asm(R"(
.text
.globl cuda_host_swap_stacks
.type cuda_host_swap_stacks, @function
cuda_host_swap_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_host_swap_stacks, .-cuda_host_swap_stacks
)");

static void prepare(Fibre& fibre) {
  uintptr_t* top = reinterpret_cast<uintptr_t*>(fibre.stack + fibre.stack_bytes) - 2;
  *--top = 0;                                   // where start would return to
  *--top = reinterpret_cast<uintptr_t>(&start);  // where the first swap returns to
  for (int i = 0; i < 6; i++) *--top = 0;
  fibre.stack_pointer = top;
}
static void swap(Fibre& from, Fibre& to) { cuda_host_swap_stacks(&from.stack_pointer, to.stack_pointer); }
#else
static void prepare(Fibre& fibre) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = fibre.stack;
  context->uc_stack.ss_size = fibre.stack_bytes;
  makecontext(context, start, 0);
  fibre.stack_pointer = context;
}
static void swap(Fibre& from, Fibre& to) {
  if (!from.stack_pointer) from.stack_pointer = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.stack_pointer), static_cast<ucontext_t*>(to.stack_pointer));
}
#endif

void fibre_adopt(Fibre& fibre) {
#ifdef CUDA_HOST_TSAN
  fibre.race_context = __tsan_get_current_fiber();
#endif
  (void)fibre;
}

void fibre_create(Fibre& fibre, void (*entry)(void*), void* argument) {
  void* memory = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
    perror("no memory for a thread's stack");
    abort();
  }
  fibre.stack = static_cast<char*>(memory) + GUARD_BYTES;
  fibre.stack_bytes = STACK_BYTES;
  fibre.bottom = fibre.stack;
  fibre.bottom_bytes = STACK_BYTES;
  fibre.entry = entry;
  fibre.argument = argument;
#ifdef CUDA_HOST_TSAN
  fibre.race_context = __tsan_create_fiber(0);
#endif
  prepare(fibre);
}

Fibre::~Fibre() {
  if (!stack) return;
#ifdef CUDA_HOST_TSAN
  __tsan_destroy_fiber(race_context);
#endif
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, stack_bytes);
#endif
#ifndef __x86_64__
  delete static_cast<ucontext_t*>(stack_pointer);
#endif
  munmap(stack - GUARD_BYTES, STACK_BYTES + GUARD_BYTES);
}

void fibre_switch(Fibre& from, Fibre& to) {
  switched_from = &from;
  switched_to = &to;
#ifdef CUDA_HOST_TSAN
  __tsan_switch_to_fiber(to.race_context, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bottom_bytes);
#endif
  swap(from, to);
  arrived();
}

#ifdef CUDA_HOST_TSAN
void race_release(void* object) { __tsan_release(object); }
void race_acquire(void* object) { __tsan_acquire(object); }
void race_read(const void* address, size_t bytes) { __tsan_read_range(address, bytes); }
void race_write(void* address, size_t bytes) { __tsan_write_range(address, bytes); }
void* race_act_as(const Fibre& fibre) {
  void* context = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fibre.race_context, __tsan_switch_to_fiber_no_sync);
  return context;
}
void race_act_back(void* context) { __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync); }
#else
void race_release(void*) {}
void race_acquire(void*) {}
void race_read(const void*, size_t) {}
void race_write(void*, size_t) {}
void* race_act_as(const Fibre&) { return nullptr; }
void race_act_back(void*) {}
#endif

}  // namespace cuda_host
