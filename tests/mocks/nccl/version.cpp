// Which library is played: the one part of the double that is compiled for each.
#include "version.hpp"

#include <cstdlib>

namespace nccl_double {

int version() {
    const char* played = environment("NCCL_DOUBLE_VERSION");
    return played ? atoi(played) : DOUBLE_VERSION;
}

bool is_rccl() { return DOUBLE_RCCL; }

}  // namespace nccl_double
