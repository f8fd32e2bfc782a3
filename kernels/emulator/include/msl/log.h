// Logging: messages are dropped.
#pragma once

namespace metal {

struct os_log {
  template <class Subsystem, class Category>
  constexpr os_log(Subsystem, Category) {}
  template <class... Words>
  MSL_FUNC void log(Words...) const {}
  template <class... Words>
  MSL_FUNC void log_debug(Words...) const {}
  template <class... Words>
  MSL_FUNC void log_info(Words...) const {}
  template <class... Words>
  MSL_FUNC void log_error(Words...) const {}
  template <class... Words>
  MSL_FUNC void log_fault(Words...) const {}
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
