def critic_step(models, optimizer, x):
    generator, critic = models
    optimizer.zero_grad()
    (critic(generator(x[:, :2]).detach()).mean() - critic(x).mean()).backward()
    optimizer.step()


def generator_step(models, optimizer, x):
    generator, critic = models
    critic.requires_grad_(False)
    optimizer.zero_grad()
    (-critic(generator(x[:, :2])).mean()).backward()
    optimizer.step()
    critic.requires_grad_(True)
