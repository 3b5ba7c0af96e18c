// What a module of kernels says of itself: ./nvcc writes the table, the driver reads it.
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cuda_driver {

// A device address among a kernel's parameters: a parameter, or a field of a struct that is passed by value.
struct Address {
  int parameter;
  size_t offset;
  const char* field;  // null: the parameter itself
};

struct Kernel {
  const char* name;
  void (*call)(void** parameters);  // cuLaunchKernel's parameters made into a call
  const size_t* parameter_bytes;
  int parameters;
  int threads_max;     // of __launch_bounds__; 0: none
  const Address* addresses;
  int address_count;
};

struct Module {
  const char* source;
  const Kernel* kernels;
  int kernel_count;
};

template <class T>
T read(const void* from) {
  T value;
  memcpy(static_cast<void*>(&value), from, sizeof value);
  return value;
}

template <auto kernel, class... P, size_t... I>
void call_with(void (*)(P...), void** parameters, std::index_sequence<I...>) {
  kernel(read<std::remove_cv_t<P>>(parameters[I])...);
}

template <class... P>
constexpr int count_of(void (*)(P...)) {
  return sizeof...(P);
}

template <auto kernel>
void call(void** parameters) {
  call_with<kernel>(kernel, parameters, std::make_index_sequence<count_of(kernel)>());
}

template <class... P>
const size_t* bytes_of(void (*)(P...)) {
  static const size_t bytes[] = {sizeof(P)..., 0};
  return bytes;
}

// The type of a kernel's parameter `i`, to name the fields of a struct.
template <size_t i, class... P>
std::remove_cv_t<std::tuple_element_t<i, std::tuple<P...>>> parameter_of(void (*)(P...));

}  // namespace cuda_driver
