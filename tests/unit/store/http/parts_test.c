/* URLs, XML, base64, digests, dates and lanes. */
#include <stdatomic.h>

#include "base/error.h"
#include "store/http/crypt.h"
#include "store/http/http.h"
#include "store/lanes.h"
#include "store/http/url.h"
#include "store/http/xml.h"
#include "tap.h"

static void a_url_is_split_into_its_parts(void)
{
        struct url url;

        REQUIRE(url_split("HTTPS://Account.Blob.core.windows.net:8443/c/a%20b?sv=1&sig=x", &url));
        CHECK(!strcmp(url.scheme, "https") && !strcmp(url.host, "account.blob.core.windows.net") && url.port == 8443);
        CHECK(url.path_size == strlen("/c/a%20b") && !memcmp(url.path, "/c/a%20b", url.path_size) && !strcmp(url.query, "sv=1&sig=x"));
        REQUIRE(url_split("az://account", &url));
        CHECK(!strcmp(url.host, "account") && url.port == -1 && !url.path_size && !*url.query);
        REQUIRE(url_split("http://[::1]:10000/x", &url));
        CHECK(!strcmp(url.host, "::1") && url.port == 10000);
}

static void an_ambiguous_url_is_refused(void)
{
        static const char *const bad[] = {
                "", "x", "//host/", "http:/host", "http://", "http:///path", "http://user@host/", "http://127.0.0.1@evil/", "http://ho st/",
                "http://host\\evil/", "http://host/a b", "http://host/\n", "http://host:0/", "http://host:65536/", "http://host:/",
                "http://host:80x/", "http://[::1/", "http://[::1]evil/", "http://host/#part", "1http://host/",
        };
        struct url url;

        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                CHECK(!url_split(bad[i], &url));
                if (url_split(bad[i], &url))
                        printf("# taken: %s\n", bad[i]);
        }
}

static void only_this_machine_is_loopback(void)
{
        static const char *const near[] = { "http://localhost/", "http://127.0.0.1:1/", "http://127.255.0.9/", "http://[::1]/" };
        static const char *const far[] = { "http://localhost.evil.com/", "http://127.0.0.1.evil.com/", "http://128.0.0.1/", "http://127.1/",
                                           "http://127.0.0.256/", "http://[::2]/", "http://0.0.0.0/", "http://127.0.0.01/" };
        struct url url;

        for (size_t i = 0; i < sizeof near / sizeof *near; i++)
                CHECK(url_split(near[i], &url) && url_is_loopback(&url));
        for (size_t i = 0; i < sizeof far / sizeof *far; i++)
                CHECK(url_split(far[i], &url) && !url_is_loopback(&url));
}

static void a_printed_url_holds_no_secret(void)
{
        char text[128];

        url_print("https://a.blob.core.windows.net/c/k?sv=2021&sig=SECRET%2B", text, sizeof text);
        CHECK(!strcmp(text, "https://a.blob.core.windows.net/c/k"));
        url_print("https://user:SECRET@host/c", text, sizeof text);
        CHECK(!strcmp(text, "https://..."));
        url_print("http://[::1]:99/x?y", text, sizeof text);
        CHECK(!strcmp(text, "http://[::1]:99/x"));
}

static void encoding_goes_back_to_the_same_bytes(void)
{
        struct buf coded = { 0 }, plain = { 0 };
        const char *text = "a/b c+d%~_-.\xC3\xA9?&=";

        url_encode(&coded, text, "/");
        buf_add_byte(&coded, 0);
        CHECK(!strcmp(coded.data, "a/b%20c%2Bd%25~_-.%C3%A9%3F%26%3D"));
        CHECK(url_decode(&plain, coded.data, coded.size - 1) && plain.size == strlen(text) && !memcmp(plain.data, text, plain.size));
        CHECK(!url_decode(&plain, "%2", 2) && !url_decode(&plain, "%zz", 3) && !url_decode(&plain, "%00", 3));
        buf_done(&coded);
        buf_done(&plain);
}

/* All beginnings and ends, as "<Name" and "Name=text>"; "!" after them when the text was refused. */
static const char *read_all(const char *text)
{
        static char told[1024];
        struct xml_item item;
        struct xml xml;

        *told = 0;
        xml_init(&xml, text, strlen(text));
        while (xml_next(&xml, &item)) {
                size_t used = strlen(told);

                if (item.kind == XML_BEGIN)
                        snprintf(told + used, sizeof told - used, "<%s%.*s ", item.name, (int)item.attributes_size, item.attributes);
                else
                        snprintf(told + used, sizeof told - used, "%s=%s> ", item.name, item.text);
        }
        if (xml.is_broken)
                strcat(told, "!");
        xml_done(&xml);
        return told;
}

static void a_listing_is_read(void)
{
        CHECK(!strcmp(read_all("\xEF\xBB\xBF<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<L S=\"a>b\"><!-- <x> --><B><N>a&amp;b&#x41;&lt;</N><P/></B></L>\n"),
                      "<L S=\"a>b\" <B <N N=a&bA<> <P P=> B=> L=> "));
        CHECK(!strcmp(read_all("<a>&#233;&#x20AC;&#x1F600;</a>"), "<a a=\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80> "));
}

static void text_that_is_not_whole_is_broken(void)
{
        static const char *const bad[] = {
                "", "x", "<a>", "<a", "<a></b>", "</a>", "<a/><b/>", "<a/>x", "<a>&x;</a>", "<a>&lt</a>", "<a>&#0;</a>", "<a>&#xD800;</a>",
                "<a>&#12x;</a>", "<a>&#x;</a>", "<!DOCTYPE a><a/>", "<a><![CDATA[x]]></a>", "<a b=\"></a>", "<a><</a>", "<?xml", "<a><!-- </a>",
                "<a><b><c><d><e><f><g><h><i><j><k><l><m><n><o><p><q></q></p></o></n></m></l></k></j></i></h></g></f></e></d></c></b></a>",
        };

        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                const char *told = read_all(bad[i]);

                CHECK(*told && told[strlen(told) - 1] == '!');
        }
}

static void base64_is_as_rfc_4648_says(void)
{
        static const char *const pairs[][2] = { { "", "" }, { "f", "Zg==" }, { "fo", "Zm8=" }, { "foo", "Zm9v" }, { "foob", "Zm9vYg==" },
                                                { "fooba", "Zm9vYmE=" }, { "foobar", "Zm9vYmFy" } };
        static const char *const bad[] = { "Z", "Zg=", "Zg===", "=g==", "Z===", "Zg==Zg==", "Zm9*", "Zm=v", "Zm9v\n" };
        char text[32], back[8];
        size_t size;

        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
                crypt_base64(pairs[i][0], strlen(pairs[i][0]), text);
                CHECK(!strcmp(text, pairs[i][1]));
                CHECK(crypt_base64_decode(text, back, sizeof back, &size) && size == strlen(pairs[i][0]) && !memcmp(back, pairs[i][0], size));
        }
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(!crypt_base64_decode(bad[i], back, sizeof back, &size));
        CHECK(!crypt_base64_decode("Zm9vYmFy", back, 5, &size));
}

/* Test case 2 of RFC 4231, and the digest of "abc" in FIPS 180-2. */
static void digests_are_those_of_the_standards(void)
{
        static const uint8_t hmac[] = { 0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75, 0xc7,
                                        0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27, 0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43 };
        static const uint8_t abc[] = { 0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
                                       0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad };
        uint8_t digest[CRYPT_SHA256_BYTES];

        CHECK(crypt_hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, digest) && !memcmp(digest, hmac, sizeof hmac));
        CHECK(crypt_sha256("abc", 3, digest) && !memcmp(digest, abc, sizeof abc));
}

static void dates_go_both_ways(void)
{
        static const char *const bad[] = { "", "Sun, 06 Nov 1994", "Sun, 06 Now 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 CET",
                                           "Sun, 06 Nov 1994 08:49:37 GMTx", "Sun, 36 Nov 1994 08:49:37 GMT", "1994-11-06T08:49:37Z" };
        char text[HTTP_DATE_SIZE];
        int64_t seconds = 0;

        http_date_format(784111777, text);
        CHECK(!strcmp(text, "Sun, 06 Nov 1994 08:49:37 GMT"));
        CHECK(http_date_parse(text, &seconds) && seconds == 784111777);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(!http_date_parse(bad[i], &seconds));
}

struct pieces {
        atomic_uint done[1000];
        size_t fails_at;
};

static enum nebula_status count_piece(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct pieces *pieces = argument;

        atomic_fetch_add(&pieces->done[index], 1);
        return index == pieces->fails_at ? error_set(error, NEBULA_STORAGE, 0, "piece %zu", index) : NEBULA_OK;
}

static void each_piece_runs_once_and_the_first_failure_ends_the_job(void)
{
        static struct pieces pieces = { .fails_at = 5000 };
        struct nebula_error error;

        CHECK(lanes_run(1000, 8, count_piece, &pieces, &error) == NEBULA_OK);
        for (size_t i = 0; i < 1000; i++)
                CHECK(atomic_load(&pieces.done[i]) == 1);
        pieces.fails_at = 3;
        CHECK(lanes_run(1000, 1, count_piece, &pieces, &error) == NEBULA_STORAGE && !strcmp(error.message, "piece 3"));
        CHECK(atomic_load(&pieces.done[4]) == 1);
        CHECK(lanes_run(0, 8, count_piece, &pieces, &error) == NEBULA_OK);
}

TAP_MAIN(TEST(a_url_is_split_into_its_parts), TEST(an_ambiguous_url_is_refused), TEST(only_this_machine_is_loopback),
         TEST(a_printed_url_holds_no_secret), TEST(encoding_goes_back_to_the_same_bytes), TEST(a_listing_is_read),
         TEST(text_that_is_not_whole_is_broken), TEST(base64_is_as_rfc_4648_says), TEST(digests_are_those_of_the_standards),
         TEST(dates_go_both_ways), TEST(each_piece_runs_once_and_the_first_failure_ends_the_job))
