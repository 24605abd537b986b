// Reads a safetensors file: eight bytes of header length, a JSON header, then the tensors' bytes.
#ifndef DDTREE_TESTS_FFI_SAFETENSORS_H_
#define DDTREE_TESTS_FFI_SAFETENSORS_H_

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Tensor {
  std::string dtype;  // safetensors' name of it
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  int64_t Count() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  template <typename T>
  std::vector<T> As() const {
    if (bytes.size() != Count() * sizeof(T)) throw std::runtime_error(dtype + " is read as another type");
    std::vector<T> values(Count());
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

// Every tensor of the file by its name. Headers are those that the library itself writes: no spaces, no escapes.
inline std::map<std::string, Tensor> ReadSafetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  uint64_t length = 0;
  if (all.size() >= 8) std::memcpy(&length, all.data(), 8);
  if (length == 0 || length > all.size() - 8) throw std::runtime_error("no safetensors file: " + path);
  const std::string header = all.substr(8, length);
  const std::regex entry(
      "\"(\\w+)\":\\{\"dtype\":\"(\\w+)\",\"shape\":\\[([\\d,]*)\\],\"data_offsets\":\\[(\\d+),(\\d+)\\]\\}");
  std::map<std::string, Tensor> tensors;
  for (std::sregex_iterator match(header.begin(), header.end(), entry), end; match != end; ++match) {
    Tensor& tensor = tensors[(*match)[1]];
    tensor.dtype = (*match)[2];
    std::istringstream sizes((*match)[3]);
    for (std::string size; std::getline(sizes, size, ',');) tensor.shape.push_back(std::stoll(size));
    const size_t first = std::stoull((*match)[4]), last = std::stoull((*match)[5]);
    if (first > last || last > all.size() - 8 - length) throw std::runtime_error("a tensor lies outside of " + path);
    tensor.bytes.assign(all.begin() + 8 + length + first, all.begin() + 8 + length + last);
  }
  return tensors;
}

#endif  // DDTREE_TESTS_FFI_SAFETENSORS_H_
