// The files of the status page, which the control port serves at "/"; CMake embeds them. The page
// polls /v1/status and draws it.
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

// REQUIRES: page_files() has a file of that path.
const PageFile& page_file(std::string_view path);

}  // namespace phub
