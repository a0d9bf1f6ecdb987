// Included before everything else in wheels for x86-64 (CMake's UNICOMM_GLIBC_2_28): has code that is
// compiled with a newer glibc run with glibc 2.28, which manylinux_2_28 promises. docs/design/wheels.md.
#pragma once

// Functions that moved between libraries, or were renamed by a version, without a change of what they do.
#define UNICOMM_AS_BEFORE(name) asm(".symver " #name "," #name "@GLIBC_2.2.5")
UNICOMM_AS_BEFORE(dladdr);
UNICOMM_AS_BEFORE(dlclose);
UNICOMM_AS_BEFORE(dlerror);
UNICOMM_AS_BEFORE(dlopen);
UNICOMM_AS_BEFORE(dlsym);
UNICOMM_AS_BEFORE(pthread_join);
UNICOMM_AS_BEFORE(pthread_key_create);
UNICOMM_AS_BEFORE(pthread_mutex_trylock);
UNICOMM_AS_BEFORE(pthread_sigmask);
UNICOMM_AS_BEFORE(shm_open);
UNICOMM_AS_BEFORE(shm_unlink);
#undef UNICOMM_AS_BEFORE

#ifdef __cplusplus
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT  // since 2.30: condition variables wait by the system's clock

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// A function of its own since 2.33; before, a macro of another name.
#define fstat(fd, status) int(::syscall(SYS_fstat, fd, status))
#endif
