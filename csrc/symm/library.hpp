// A table from a shared object that was built elsewhere: it exports `unicomm_symm_table`.
#pragma once
#include <string>

#include "symm/table.hpp"

namespace unicomm::symm {

// Throws SystemFailure. The object stays loaded: what it has allocated may outlive the table.
Vtbl library_table(const std::string& path);

}  // namespace unicomm::symm
