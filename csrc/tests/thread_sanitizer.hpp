// Included first into what the thread sanitizer checks: GCC's runtime knows no pthread_mutex_clocklock before
// version 14, and would take a std::timed_mutex for unlocked. Without this macro pthread_mutex_timedlock is
// called instead.
#pragma once

#include <cstddef>

#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
