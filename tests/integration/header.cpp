// Saves and loads by all of nebula.hpp, and prints what it finds. For test_installed.py.
#include <nebula.hpp>

#include <algorithm>
#include <array>
#include <iostream>
#include <numeric>

int main(int, char **argv)
try {
        nebula::session session(argv[1]);
        std::vector<double> plate(12);
        std::array<float, 3> line{1, 2, 3};
        const std::string text = "any bytes";

        if (session.latest() || session.find("none"))
                return 1;
        std::iota(plate.begin(), plate.end(), 0.0);
        auto checkpoint = session.begin("step1");
        checkpoint.save("all.pt", {nebula::tensor("plate", plate.data(), {3, 4}), nebula::tensor("line", line)});
        checkpoint.save_bytes("text", text.data(), text.size());
        checkpoint.commit();
        std::fill(plate.begin(), plate.end(), -1.0);
        checkpoint.wait();
        if (checkpoint.state() != NEBULA_STATE_DURABLE)
                return 2;
        auto given_up = session.begin("step2");
        given_up.save("all.pt", {nebula::tensor("line", line)});
        given_up.fail("the test gives it up");

        const auto found = session.latest();
        const auto map = found.map("all.pt");
        const auto seen = map.view<double>("plate");
        std::cout << found.tag() << ' ' << seen.shape().size() << ' ' << seen.size() << ' ' << std::accumulate(seen.begin(), seen.end(), 0.0) << '\n';
        map.read("plate", plate);
        std::cout << std::equal(seen.begin(), seen.end(), plate.begin()) << ' ' << seen[11] << '\n';
        const auto bytes = found.map("text");
        std::cout << std::string(static_cast<const char *>(bytes.data()), bytes.size()) << '\n';
        std::cout << (session.report(NEBULA_REPORT_VERSIONS).find("\"step1\"") != std::string::npos) << std::endl;
        try {
                map.read("line", plate);
        } catch (const nebula::error &failure) {
                std::cout << nebula_status_name(failure.status()) << ' ' << failure.what() << std::endl;
        }
        const auto moved = std::move(session);
        found.map("none");
        return 3;
} catch (const nebula::error &failure) {
        std::cout << nebula_status_name(failure.status()) << std::endl;
        return 0;
}
