// How the implementations of the table report a failure.
#pragma once
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "symm/table.hpp"

namespace unicomm::symm {

// Fills `error`, cutting what it has no room for, and returns the code.
inline int report(FaultCode code, const std::string& detail, Error* error,
                  const std::vector<int>& culprits = {}) {
    error->n_culprits = int32_t(std::min(culprits.size(), std::size(error->culprits)));
    std::copy_n(culprits.begin(), error->n_culprits, error->culprits);
    size_t n = std::min(detail.size(), sizeof error->detail - 1);
    std::memcpy(error->detail, detail.data(), n);
    error->detail[n] = 0;
    return int(code);
}

inline int report(const std::string& detail, Error* error) {
    return report(FaultCode::kInternal, detail, error);
}

}  // namespace unicomm::symm
