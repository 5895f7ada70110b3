// One line on stderr that says what is going on: rewritten on a terminal, else repeated now and
// then.
#pragma once

#include <string>
#include <string_view>

namespace phub {

class Progress {
 public:
  explicit Progress(bool enabled);
  ~Progress() { clear(); }

  // What a new piece of work is called. Shown once it has taken a second.
  void begin(std::string_view what);
  // How far it is. Cheap; shows at most five times a second (a terminal) or every five seconds.
  void update(std::string_view how_far);
  // Removes the line, before something else is printed.
  void clear();

 private:
  bool enabled_, terminal_;
  bool shown_ = false;
  std::string what_;
  double begun_s_ = 0, last_s_ = 0;
};

}  // namespace phub
