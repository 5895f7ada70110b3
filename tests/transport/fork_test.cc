// What the children of a process find at the descriptors that they must not have.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "transport/fd.h"

namespace phub {
namespace fork_test {

int file() { return memfd_create("fork_test", MFD_CLOEXEC); }

bool is_dev_null(int fd) {
  struct stat here = {}, null = {};
  return fstat(fd, &here) == 0 && stat("/dev/null", &null) == 0 && S_ISCHR(here.st_mode) &&
         here.st_rdev == null.st_rdev;
}
bool same_file(int a, int b) {
  struct stat of_a = {}, of_b = {};
  return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_ino == of_b.st_ino &&
         of_a.st_dev == of_b.st_dev;
}

// Whether `body` is true in a child.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

TEST(ClosedOnFork, AChildGetsNothingInItsPlaceWhileItLives) {
  const int fd = file(), other = file();
  {
    const ClosedOnFork listed(fd);
    EXPECT_TRUE(in_child([&] { return is_dev_null(fd) && !is_dev_null(other); }));
    EXPECT_FALSE(is_dev_null(fd));
  }
  EXPECT_TRUE(in_child([&] { return !is_dev_null(fd); }));
  close(fd);
  close(other);
}

TEST(ClosedOnFork, AChildsChildKeepsWhatTheChildOpened) {
  const int fd = file();
  const ClosedOnFork listed(fd);
  EXPECT_TRUE(in_child([&] {
    const int own = file();
    close(fd);
    dup2(own, fd);
    return in_child([&] { return same_file(own, fd); });
  }));
  close(fd);
}

TEST(ClosedOnFork, AChildListsItsOwn) {
  const int fd = file();
  const ClosedOnFork listed(fd);
  EXPECT_TRUE(in_child([&] {
    const int own = file();
    dup2(own, fd);
    const ClosedOnFork listed_here(own);
    return in_child([&] { return is_dev_null(own) && !is_dev_null(fd); });
  }));
  close(fd);
}

}  // namespace fork_test
}  // namespace phub
