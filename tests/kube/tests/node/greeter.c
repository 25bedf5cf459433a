// A server small enough for an image: greets whoever connects to port 8080.
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};
    int one = 1, listening = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) || listen(listening, 8)) {
        perror("listen");
        return 1;
    }
    puts("greeter is ready");
    fflush(stdout);
    for (;;) {
        int peer = accept(listening, 0, 0);
        if (peer < 0) continue;
        write(peer, "hello\n", 6);
        close(peer);
    }
}
