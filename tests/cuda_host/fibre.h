// A fibre: a stack and a place in a program. Switching costs a few nanoseconds; a fibre stays on its OS thread.
#pragma once

#include <cstddef>

namespace cuda_host {

struct Fibre {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // null for the OS thread's own stack
  size_t stack_bytes = 0;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  // What the sanitizers keep for it.
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t bottom_bytes = 0;
  void* race_context = nullptr;

  Fibre() = default;
  Fibre(const Fibre&) = delete;
  ~Fibre();
};

// The fibre of the calling OS thread.
void fibre_adopt(Fibre& fibre);
// A fibre that calls `entry(argument)`, which must not return, at its first switch.
void fibre_create(Fibre& fibre, void (*entry)(void*), void* argument);
void fibre_switch(Fibre& from, Fibre& to);

// What ThreadSanitizer is told; nothing in other builds. The engine itself is not instrumented.
void race_release(void* object);
void race_acquire(void* object);
void race_read(const void* address, size_t bytes);
void race_write(void* address, size_t bytes);
// Between the two, accesses and releases count as `fibre`'s.
void* race_act_as(const Fibre& fibre);
void race_act_back(void* context);

}  // namespace cuda_host
