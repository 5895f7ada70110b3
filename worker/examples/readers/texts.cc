#include "worker/examples/readers/texts.h"

#include <algorithm>
#include <fstream>
#include <map>

#include "transport/error.h"
#include "worker/examples/files.h"

namespace phub::examples {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::vector<std::string> words_of(const std::string& line, uint32_t least) {
  std::vector<std::string> words;
  for (auto at = line.begin(); at != line.end();) {
    const auto begin = std::find_if(at, line.end(), is_letter);
    at = std::find_if_not(begin, line.end(), is_letter);
    if (at - begin < static_cast<ptrdiff_t>(std::max(least, 1u))) continue;
    std::string word(begin, at);
    for (char& c : word) c = static_cast<char>(c | 0x20);
    words.push_back(std::move(word));
  }
  return words;
}

}  // namespace

Texts read_texts(const std::string& path, const TextOptions& options) {
  std::ifstream file = open_to_read(path);
  std::vector<std::vector<std::string>> documents;
  struct Word {
    uint32_t documents = 0, number = 0;
    size_t last = 0;  // document, from 1
  };
  std::map<std::string, Word> all;
  for (std::string line; std::getline(file, line);) {
    documents.push_back(words_of(line, options.least_letters));
    for (const std::string& each : documents.back()) {
      Word& word = all[each];
      if (word.last != documents.size()) ++word.documents;
      word.last = documents.size();
    }
  }
  const double most = options.most_documents * static_cast<double>(documents.size());
  std::erase_if(all, [&](const auto& entry) {
    return entry.second.documents < options.least_documents || entry.second.documents > most;
  });
  if (all.empty()) {
    fail(ErrorCode::kInvalid,
         "{}: of its {} documents, one in a line, no word is in at least {} and at most {:.0f}",
         path, documents.size(), options.least_documents, most);
  }
  Texts texts;
  for (auto& [word, about] : all) {
    about.number = static_cast<uint32_t>(texts.words.size());
    texts.words.push_back(word);
  }
  for (const auto& document : documents) {
    auto& numbers = texts.documents.emplace_back();
    for (const std::string& word : document) {
      if (const auto at = all.find(word); at != all.end()) numbers.push_back(at->second.number);
    }
  }
  return texts;
}

}  // namespace phub::examples
