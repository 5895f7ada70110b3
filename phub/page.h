// The status page that the control port shows at "/": files of phub/, embedded by CMake. It polls
// /v1/status and draws what it gets.
#pragma once

#include <span>
#include <string_view>

namespace phub {

struct PageFile {
  std::string_view path;  // "/page.js"
  std::string_view content_type;
  std::string_view text;
};

std::span<const PageFile> page_files();

// REQUIRES: there is a file of that path.
const PageFile& page_file(std::string_view path);

}  // namespace phub
