// Files with counts of words in documents: Blei's format of LDA-C, and the Matrix Market's.
#pragma once

#include <string>

#include "worker/examples/readers/texts.h"

namespace phub::examples {

bool is_name_of_counts(const std::string& path);
// See read_corpus(). The same word is as often in `documents` as it is counted.
Corpus read_counts(const std::string& path, const std::string& vocabulary);

}  // namespace phub::examples
