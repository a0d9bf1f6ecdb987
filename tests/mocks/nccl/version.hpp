// What differs between the libraries that are played; small, because version.cpp is compiled for each.
#pragma once

namespace mock_nccl {

int version();  // of the library that is played, as NCCL's code
bool is_rccl();
const char* environment(const char* name);  // null for one that is not set, or empty

}  // namespace mock_nccl
