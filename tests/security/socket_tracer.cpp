// A library for LD_PRELOAD that notes which library of a process made a socket at which others can call.
//
// Each call of listen, and of bind for a socket that needs no listen, adds a line to the file SOCKET_TRACE:
// network namespace, address, port, file of the caller. tests/security/socket_owners.py reads it.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool address_of(int fd, char* out, std::size_t size, int& port) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return false;
  port = 0;
  if (address.ss_family == AF_INET) {
    auto& in = reinterpret_cast<sockaddr_in&>(address);
    port = ntohs(in.sin_port);
    return inet_ntop(AF_INET, &in.sin_addr, out, static_cast<socklen_t>(size)) != nullptr;
  }
  if (address.ss_family == AF_INET6) {
    auto& in = reinterpret_cast<sockaddr_in6&>(address);
    port = ntohs(in.sin6_port);
    return inet_ntop(AF_INET6, &in.sin6_addr, out, static_cast<socklen_t>(size)) != nullptr;
  }
  if (address.ss_family != AF_UNIX) return false;
  auto& un = reinterpret_cast<sockaddr_un&>(address);
  bool is_abstract = length > offsetof(sockaddr_un, sun_path) && un.sun_path[0] == 0;
  int chars = static_cast<int>(length - offsetof(sockaddr_un, sun_path)) - (is_abstract ? 1 : 0);
  std::snprintf(out, size, "%s%.*s", is_abstract ? "@" : "", chars, un.sun_path + (is_abstract ? 1 : 0));
  return chars > 0;
}

void note(int fd, void* caller) {
  const int before = errno;
  const char* file = std::getenv("SOCKET_TRACE");
  char address[256], name_space[64] = "", line[1024];
  int port = 0;
  Dl_info info{};
  if (file != nullptr && address_of(fd, address, sizeof address, port)) {
    if (readlink("/proc/self/ns/net", name_space, sizeof name_space - 1) < 0) name_space[0] = 0;
    const char* library = dladdr(caller, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
    int n = std::snprintf(line, sizeof line, "%s\t%s\t%d\t%s\n", name_space, address, port, library);
    int out = open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (out >= 0) {
      if (n > 0 && write(out, line, static_cast<std::size_t>(n)) < 0) std::perror("SOCKET_TRACE");
      close(out);
    }
  }
  errno = before;
}

}  // namespace

extern "C" int listen(int fd, int backlog) {
  static auto real = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "listen"));
  int result = real(fd, backlog);
  if (result == 0) note(fd, __builtin_return_address(0));
  return result;
}

extern "C" int bind(int fd, const sockaddr* address, socklen_t length) {
  static auto real = reinterpret_cast<int (*)(int, const sockaddr*, socklen_t)>(dlsym(RTLD_NEXT, "bind"));
  int result = real(fd, address, length), kind = 0;
  socklen_t size = sizeof kind;
  if (result == 0 && getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0 && kind == SOCK_DGRAM)
    note(fd, __builtin_return_address(0));
  return result;
}
