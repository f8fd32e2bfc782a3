// Logging: messages are dropped.
#pragma once

namespace metal {

struct os_log {
  constexpr os_log(constant char*, constant char*) {}
  template <class... Rest>
  MSL_FUNC void log(constant char*, Rest...) const {}
  template <class... Rest>
  MSL_FUNC void log_debug(constant char*, Rest...) const {}
  template <class... Rest>
  MSL_FUNC void log_info(constant char*, Rest...) const {}
  template <class... Rest>
  MSL_FUNC void log_error(constant char*, Rest...) const {}
  template <class... Rest>
  MSL_FUNC void log_fault(constant char*, Rest...) const {}
};
constexpr os_log os_log_default("", "");

// The same value in all threads of the grid; nothing checks that.
template <class T>
struct uniform {
  T value;
  constexpr uniform(T given) : value(given) {}
  constexpr operator T() const { return value; }
};
template <class T>
MSL_FUNC constexpr uniform<T> make_uniform(T value) {
  return value;
}

}  // namespace metal
