#include "worker/examples/readers/texts.h"

#include <locale.h>
#include <wctype.h>

#include <algorithm>
#include <cwchar>
#include <filesystem>
#include <limits>
#include <string_view>
#include <utility>

#include "worker/examples/readers/counts.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

constexpr size_t kLongestText = size_t{1} << 30;  // bytes of a line that is a document

// The letters of UTF-8, in every locale of the process.
class Letters {
 public:
  Letters() : locale_(newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr)) {
    if (locale_ == nullptr) {
      fail(ErrorCode::kUnavailable, "the C library has no locale C.UTF-8, which tells letters");
    }
    before_ = uselocale(locale_);
  }
  ~Letters() {
    uselocale(before_);
    freelocale(locale_);
  }
  Letters(const Letters&) = delete;
  Letters& operator=(const Letters&) = delete;

  // Cuts a character off. Its small letter, valid until the next call; "": it is no letter.
  std::string_view next(std::string_view& text, const Lines& lines) {
    const auto first = static_cast<unsigned char>(text.front());
    if (first < 0x80) {  // most are
      const char small = static_cast<char>(first | 0x20);
      text.remove_prefix(1);
      letter_[0] = small;
      return {letter_, small >= 'a' && small <= 'z' ? size_t{1} : size_t{0}};
    }
    wchar_t wide = 0;
    std::mbstate_t state{};
    const size_t bytes = std::mbrtowc(&wide, text.data(), text.size(), &state);
    if (bytes > text.size()) {
      lines.refuse(
          "it is not UTF-8 at byte 0x{:02x}: convert the file, as with `iconv -f latin1 -t "
          "utf-8`",
          first);
    }
    text.remove_prefix(bytes);
    if (!iswalpha(static_cast<wint_t>(wide))) return {};
    state = {};
    const size_t written =
        std::wcrtomb(letter_, static_cast<wchar_t>(towlower(static_cast<wint_t>(wide))), &state);
    return {letter_, written};
  }

 private:
  locale_t locale_, before_;
  char letter_[16] = {};
};

class TextReader {
 public:
  TextReader(Corpus& corpus, uint32_t least_letters)
      : words_(corpus.words), least_(std::max(least_letters, 1u)) {}

  void add(std::string_view text, std::vector<uint32_t>& document, const Lines& lines) {
    uint32_t letters = 0;
    word_.clear();
    const auto end_word = [&] {
      if (letters >= least_) document.push_back(words_.of(word_, lines));
      letters = 0;
      word_.clear();
    };
    while (!text.empty()) {
      const std::string_view letter = letters_.next(text, lines);
      if (letter.empty()) {
        end_word();
      } else {
        ++letters;
        word_ += letter;
      }
    }
    end_word();
  }

 private:
  Names words_;
  const uint32_t least_;
  Letters letters_;
  std::string word_;
};

Corpus read_folder(const std::string& path, const CorpusOptions& options) {
  Corpus corpus;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.is_regular_file() && extension_of(entry.path().string()) == "txt") {
      corpus.names.push_back(entry.path().filename().string());
    }
  }
  if (corpus.names.empty()) {
    fail(ErrorCode::kInvalid, "{}: the folder has no files .txt, of which each is a document",
         path);
  }
  std::ranges::sort(corpus.names);
  TextReader reader(corpus, options.least_letters);
  for (const std::string& name : corpus.names) {
    Lines lines((std::filesystem::path(path) / name).string(), kLongestText);
    auto& document = corpus.documents.emplace_back();
    while (const auto line = lines.next()) reader.add(*line, document, lines);
    corpus.digest = digest_of(corpus.digest ^ lines.digest(), name);
  }
  return corpus;
}

Corpus read_lines(const std::string& path, const CorpusOptions& options) {
  Corpus corpus;
  TextReader reader(corpus, options.least_letters);
  Lines lines(path, kLongestText);
  while (const auto line = lines.next()) {
    corpus.names.push_back(std::to_string(lines.number()));
    reader.add(*line, corpus.documents.emplace_back(), lines);
  }
  corpus.digest = lines.digest();
  return corpus;
}

}  // namespace

Corpus read_corpus(const std::string& path, const CorpusOptions& options) {
  std::error_code unknown;
  if (std::filesystem::is_directory(path, unknown)) return read_folder(path, options);
  return is_name_of_counts(path) ? read_counts(path, options.vocabulary)
                                 : read_lines(path, options);
}

Texts texts_of(const Corpus& corpus, const TextOptions& options, const std::string& path) {
  struct Word {
    uint32_t documents = 0;
    size_t last = 0;  // document, from 1
  };
  std::vector<Word> all(corpus.words.size());
  for (size_t d = 0; d < corpus.documents.size(); ++d) {
    for (const uint32_t each : corpus.documents[d]) {
      if (std::exchange(all[each].last, d + 1) != d + 1) ++all[each].documents;
    }
  }
  const double most = options.most_documents * static_cast<double>(corpus.documents.size());
  std::vector<uint32_t> kept;
  for (uint32_t w = 0; w < all.size(); ++w) {
    const uint32_t documents = all[w].documents;
    if (documents > 0 && documents >= options.least_documents && documents <= most) {
      kept.push_back(w);
    }
  }
  if (kept.empty()) {
    fail(ErrorCode::kInvalid,
         "{}: of its {} documents and {} words no word is in at least {} and at most {:.0f} "
         "documents: change --least-documents {} or --most-documents {}",
         path, corpus.documents.size(), corpus.words.size(), options.least_documents, most,
         options.least_documents, options.most_documents);
  }
  std::ranges::sort(kept, {}, [&](uint32_t w) -> std::string_view { return corpus.words[w]; });
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> numbers(corpus.words.size(), kNone);
  Texts texts{.digest = corpus.digest};
  for (const uint32_t w : kept) {
    numbers[w] = static_cast<uint32_t>(texts.words.size());
    texts.words.push_back(corpus.words[w]);
  }
  for (const auto& document : corpus.documents) {
    auto& words = texts.documents.emplace_back();
    for (const uint32_t each : document) {
      if (numbers[each] != kNone) words.push_back(numbers[each]);
    }
  }
  return texts;
}

}  // namespace phub::examples
