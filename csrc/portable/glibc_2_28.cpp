// What the static C++ library of the compiler wants of a newer glibc; see glibc_2_28.hpp. The linker's --wrap
// has all references to a name go to its __wrap_ form.
#include <pthread.h>

asm(".symver old_pthread_create,pthread_create@GLIBC_2.2.5");
asm(".symver old_pthread_detach,pthread_detach@GLIBC_2.2.5");
asm(".symver old_pthread_once,pthread_once@GLIBC_2.2.5");

extern "C" {

int old_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
int old_pthread_detach(pthread_t);
int old_pthread_once(pthread_once_t*, void (*)());

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
    return old_pthread_create(thread, how, run, with);
}
int __wrap_pthread_detach(pthread_t thread) { return old_pthread_detach(thread); }
int __wrap_pthread_once(pthread_once_t* once, void (*run)()) { return old_pthread_once(once, run); }

char __wrap___libc_single_threaded = 0;  // never known, so counters of references stay atomic

}  // extern "C"
