// Which library is played: the one part of the mock that is compiled for each.
#include "version.hpp"

#include <cstdlib>

namespace mock_nccl {

int version() {
    const char* played = environment("NCCL_MOCK_VERSION");
    return played ? atoi(played) : MOCK_VERSION;
}

bool is_rccl() { return MOCK_RCCL; }

}  // namespace mock_nccl
