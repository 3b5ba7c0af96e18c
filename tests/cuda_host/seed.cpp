// Seeds one bug of bugs.txt in a copy of the kernels.
//   seed BUGS                          prints how many there are
//   seed BUGS NUMBER KERNELS TARGET    copies KERNELS to TARGET with bug NUMBER (from 1); prints its file, `runs` or
//                                      `refused` (by the compiler), its name, and what to try first, with tabs between
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace files = std::filesystem;

struct Bug {
  std::string name, file, first, find, put;
  bool refused = false;
};

[[noreturn]] static void stop(const std::string& text) {
  fprintf(stderr, "seed: %s\n", text.c_str());
  exit(1);
}

static std::string text_of(const files::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) stop("cannot read " + path.string());
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

static std::vector<Bug> read_bugs(const char* path) {
  std::vector<Bug> bugs;
  std::istringstream lines(text_of(path));
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    number++;
    if (line.empty() || line[0] == '#') continue;
    const std::string rest = line.size() > 2 ? line.substr(2) : "";
    if (line[0] != '=' && bugs.empty()) stop("bugs.txt starts without a name");
    const auto add = [&](std::string& text) { text += (text.empty() ? "" : "\n") + rest; };
    switch (line[0]) {
      case '=': bugs.push_back({rest, "", "", "", ""}); break;
      case '@': bugs.back().file = rest; break;
      case '~': bugs.back().first = rest; break;
      case '!': bugs.back().refused = true; break;
      case '-': add(bugs.back().find); break;
      case '+': add(bugs.back().put); break;
      default: stop("bugs.txt, line " + std::to_string(number) + ": not understood");
    }
  }
  return bugs;
}

int main(int count, char** arguments) {
  if (count != 2 && count != 5) stop("usage: seed BUGS [NUMBER KERNELS TARGET]");
  const std::vector<Bug> bugs = read_bugs(arguments[1]);
  if (count == 2) return printf("%zu\n", bugs.size()), 0;

  const size_t number = std::strtoul(arguments[2], nullptr, 10);
  if (number < 1 || number > bugs.size()) stop("no such bug");
  const Bug& bug = bugs[number - 1];
  const files::path kernels = arguments[3], target = arguments[4];
  files::remove_all(target);
  files::copy(kernels, target);

  std::string text = text_of(kernels / bug.file);
  const size_t at = text.find(bug.find);
  if (bug.find.empty() || at == std::string::npos) stop("'" + bug.name + "': its text is not in " + bug.file);
  if (text.find(bug.find, at + 1) != std::string::npos) stop("'" + bug.name + "': its text is in " + bug.file + " twice");
  text.replace(at, bug.find.size(), bug.put);
  std::ofstream(target / bug.file, std::ios::binary) << text;
  printf("%s\t%s\t%s\t%s\n", bug.file.c_str(), bug.refused ? "refused" : "runs", bug.name.c_str(), bug.first.c_str());
}
