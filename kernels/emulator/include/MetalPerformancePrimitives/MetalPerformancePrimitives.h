#include <msl/tensors.h>
