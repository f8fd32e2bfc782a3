// Metal's log: a printf that prints the lines of one thread; see `print_from` in kernel.py.
#pragma once

namespace metal {

template <class T>
MSL_FUNC auto msl_logged(T value) {
  if constexpr (is_floating_point_v<T>) return (double)value;  // printf takes doubles
  else return value;
}

struct os_log {
  constexpr os_log() {}
  template <class Subsystem, class Category>
  constexpr os_log(Subsystem, Category) {}
#define MSL_LOG(NAME)                                                     \
  template <class... T>                                                   \
  MSL_FUNC void NAME(const char* format, T... values) const {             \
    msl_print(format, msl_logged(values)...);                             \
  }
  MSL_LOG(log)
  MSL_LOG(log_debug)
  MSL_LOG(log_info)
  MSL_LOG(log_error)
  MSL_LOG(log_fault)
#undef MSL_LOG
};
constexpr os_log os_log_default;

}  // namespace metal
